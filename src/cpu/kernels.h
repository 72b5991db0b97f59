// The two ways to attend one item, each compiled per target and chosen at run time. Both start from an empty
// state and leave max, sum and out of the item's rows in `scratch`. Neither allocates.
#pragma once

#include "cpu/layer.h"

namespace halftone::cpu {

/// Few rows: reads the codes where they lie. item.rows <= kDirectRows.
void direct_item(const Layer& layer, const Item& item, Scratch& scratch);

/// Any number of rows: decodes each chunk once, then multiplies blocks of it with all rows.
void blocked_item(const Layer& layer, const Item& item, Scratch& scratch);

/// fp32 lanes of a vector on the instruction set that these run on: what a layer's maps must be made for.
int vector_lanes();

}  // namespace halftone::cpu
