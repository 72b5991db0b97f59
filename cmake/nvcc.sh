#!/usr/bin/env bash
# nvcc.sh COMMAND...: runs nvcc, and fails where its assembler says that it could not leave products of warpgroups in
# flight, or registers with whom they were given to: the kernel is right, but several times slower. These are notes (C75xx),
# which -Werror does not reach, neither nvcc's nor ptxas'.
set -uo pipefail

{ notes="$("$@" 2>&1 >&3 3>&-)"; status=$?; } 3>&1
[[ -z "$notes" ]] || printf '%s\n' "$notes" >&2
((status == 0)) || exit "$status"
grep -qE '\(C75[0-9]{2}\)|Potential Performance Loss' <<<"$notes" || exit 0
echo "nvcc.sh: error: ptxas' notes above say that a kernel loses its speed; -DHALFTONE_WERROR=OFF builds it all the same" >&2
while (($# > 1)); do  # Ninja would find the object new
  [[ "$1" != -o ]] || rm -f -- "$2"
  shift
done
exit 1
