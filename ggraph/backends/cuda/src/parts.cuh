// Rows on their way into products: each value as two bf16 numbers, whose sum has 16 of its bits. Four
// values are sixteen bytes: the first numbers, then the second.
#pragma once
#include "pieces.cuh"

DEV Quad parts_of(const float (&v)[4]) {
  Quad four;
  split<As_bf16>(v, four.w, four.w + 2);
  return four;
}
