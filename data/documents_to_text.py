#!/usr/bin/env python3
"""Turns one unpacked documentation package into one plain-text training file.

Output format: documents one after another, each as a form feed, the document's
name on the rest of that line, then its text. Blocks of text of 40 characters or
more that were already written (page furniture, reference entries repeated on
many pages) are dropped; the hashes of the written blocks are kept in the
--seen file, so the same block cannot reach both the training and the held-out
documents, within a package or across packages.

Kinds of input:
  html     every .html file below the folder, tags stripped
  wordnet  WordNet's data.* files, one "words: gloss" line per entry
  verses   "Book1:2 text" lines on standard input, one document per book
Only Python's standard library is needed.
"""

import argparse
import hashlib
import pathlib
import re
import sys
from html.parser import HTMLParser

BLOCK_TAGS = frozenset(
    "address article blockquote body br caption center dd details div dl dt fieldset figcaption"
    " figure h1 h2 h3 h4 h5 h6 hr li main ol p pre section summary table tbody td th thead tr ul".split()
)
VOID_TAGS = frozenset("area base br col embed hr img input link meta source track wbr".split())
SKIPPED_TAGS = frozenset("head script style nav aside footer svg button select form noscript".split())
SKIPPED_CLASSES = frozenset(
    "navheader navfooter sphinxsidebar related topbar sidebar headerlink leftmenu menu toc searchmenu"
    " nosearch mobile-topbar sub out-of-band src srclink notable-traits github-button hide-mobile".split()
)
# Long furniture is cut before parsing, because HTMLParser is slow.
FURNITURE = re.compile(r"<(script|style|nav|aside|svg)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)

SHORTEST_REPEATED_BLOCK = 40  # characters; shorter blocks are kept however often they occur
SHORTEST_DOCUMENT = 200  # characters
WORDNET_LINES_PER_DOCUMENT = 400


class BlockExtractor(HTMLParser):
    """Collects the visible text of a page as a list of blocks (a <pre> is one block)."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.blocks = []
        self._parts = []
        self._skipping = []  # open tags inside the skipped element, outermost first
        self._pre_depth = 0

    def handle_starttag(self, tag, attrs):
        if tag in VOID_TAGS:
            if tag in BLOCK_TAGS and not self._skipping and not self._pre_depth:
                self._end_block()
            return
        if self._skipping:
            self._skipping.append(tag)
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES:
            self._skipping.append(tag)
            return
        if tag in BLOCK_TAGS and not self._pre_depth:
            self._end_block()
        if tag == "pre":
            self._pre_depth += 1

    def handle_endtag(self, tag):
        if self._skipping:
            # Pages leave <li> or <p> open: an end tag closes everything above its start tag.
            if tag in self._skipping:
                while self._skipping.pop() != tag:
                    pass
            return
        if tag == "pre" and self._pre_depth:
            self._end_block()
            self._pre_depth -= 1
        elif tag in BLOCK_TAGS and not self._pre_depth:
            self._end_block()

    def handle_data(self, data):
        if not self._skipping:
            self._parts.append(data)

    def close(self):
        super().close()
        self._end_block()

    def _end_block(self):
        text = "".join(self._parts)
        self._parts = []
        if self._pre_depth:
            text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        else:
            text = " ".join(text.split())
        if text.strip():
            self.blocks.append(text)


def html_documents(folder, excluded):
    """Yields (name, blocks) for every page below the folder, in sorted order."""
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or (excluded and re.search(excluded, name)):
            continue
        extractor = BlockExtractor()
        extractor.feed(FURNITURE.sub(" ", path.read_text(encoding="utf-8", errors="replace")))
        extractor.close()
        yield name, extractor.blocks


def wordnet_documents(folder):
    """Yields (name, blocks) with one "words: gloss" block per WordNet entry."""
    for path in sorted(folder.rglob("data.*")):
        lines = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            fields, bar, gloss = line.partition(" | ")
            if not bar or line.startswith(" "):
                continue
            fields = fields.split()
            count = int(fields[3], 16)
            words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]]
            lines.append(f"{', '.join(words)}: {gloss.strip()}")
        for start in range(0, len(lines), WORDNET_LINES_PER_DOCUMENT):
            yield f"{path.name}/{start}", lines[start : start + WORDNET_LINES_PER_DOCUMENT]


def verse_documents(stream):
    """Yields (book, blocks): the verses of a chapter, without their numbers, are one block."""
    books = {}
    for line in stream:
        match = re.match(r"\s*(\d?\s*[A-Za-z ]+?)\s*(\d+):\d+\s+(.*)", line)
        if match:
            book, chapter, verse = match.groups()
            books.setdefault(book, {}).setdefault(int(chapter), []).append(verse.strip())
    for book, chapters in books.items():
        yield book, [" ".join(verses) for verses in chapters.values()]


def new_blocks(blocks, seen):
    """The blocks not written before; records their hashes in `seen`."""
    kept = []
    for block in blocks:
        if len(block) >= SHORTEST_REPEATED_BLOCK:
            digest = hashlib.blake2b(block.encode(), digest_size=8).hexdigest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(block)
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["html", "wordnet", "verses"])
    parser.add_argument("output", type=pathlib.Path, help="text file to write")
    parser.add_argument("--folder", type=pathlib.Path, help="unpacked package (html, wordnet)")
    parser.add_argument("--exclude", default="", help="regular expression over document names to leave out (html)")
    parser.add_argument("--seen", type=pathlib.Path, required=True, help="file of block hashes, read and extended")
    args = parser.parse_args()
    if args.kind != "verses" and (args.folder is None or not args.folder.is_dir()):
        parser.error(f"--folder {args.folder}: not a folder; name the unpacked package")

    if args.kind == "html":
        documents = html_documents(args.folder, args.exclude)
    elif args.kind == "wordnet":
        documents = wordnet_documents(args.folder)
    else:
        documents = verse_documents(sys.stdin)

    seen = set(args.seen.read_text().split()) if args.seen.exists() else set()
    count = size = 0
    with args.output.open("w", encoding="utf-8") as out:
        for name, blocks in documents:
            text = "\n".join(new_blocks(blocks, seen)).replace("\f", " ")
            if len(text) < SHORTEST_DOCUMENT:
                continue
            out.write(f"\f{name}\n{text}\n")
            count += 1
            size += len(text)
    args.seen.write_text("\n".join(sorted(seen)))
    print(f"{args.output.name}: {count} documents, {size / 1e6:.1f} million characters")


if __name__ == "__main__":
    main()
