// Rows on their way into products, in one of two forms.
//
// Parts: each value as two bf16 numbers, whose sum has 16 of its bits. Four values are sixteen
// bytes: the first numbers, then the second.
//
// Codes: groups of 32 columns as integers of 20 bits, whose unit the largest of a group decides. A
// code is 65536 * high + 256 * middle + low, of which the first byte has the sign. Four columns of
// one of these are a word. A group is eight quads, t = 0 .. 3 of two halves: {high of columns 4t, of
// 16 + 4t, middle of both}, and {low of both, unit, sum}. Those of eight rows lie together, as the
// lanes of a warp want them, and behind them what its results need of two rows at once: {unit, sum}
// of both, and the sums of both {first, last 16 columns}. A value that is infinite or no number makes
// sums of its group, and products, no number.
#pragma once
#include "pieces.cuh"

#define MOST_CODE 524287.0f  // 2^19 - 1
#define CODED_QUADS 72       // of a group of eight rows
#define LEAST_MOST 1e-30f    // below, units would have fewer digits, and inverses no end

DEV Quad parts_of(const float (&v)[4]) {
  Quad four;
  split<As_bf16>(v, four.w, four.w + 2);
  return four;
}

// Parts of y [n], which this block has just written; n is a multiple of four.
DEV void give_parts(const float* y, Quad* parts, i64 n) {
  __syncthreads();
  for (i64 i = threadIdx.x; 4 * i < n; i += blockDim.x) {
    const float v[4] = {y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]};
    parts[i] = parts_of(v);
  }
}

// Parts of what four lanes have side by side, where there is something; for whole warps.
DEV void give_lanes_part(float value, Quad* part, bool there) {
  const float v[4] = {value, SHUFFLE_XOR(value, 1), SHUFFLE_XOR(value, 2), SHUFFLE_XOR(value, 3)};
  if (there && threadIdx.x % 4 == 0) *part = parts_of(v);
}

// The nearest integer, of two the even one; 0 of what is no number.
#ifdef GGRAPH_HOST
DEV int nearest(float value) { return value == value ? (int)nearbyintf(value) : 0; }
#else
DEV int nearest(float value) {
  int whole;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole) : "f"(value));
  return whole;
}
#endif

// Byte `number` of each of four integers.
DEV u32 bytes_of(const int (&of)[4], int number) {
  const u32 chosen = 0x40u + 0x11u * number;
  return permute(permute(of[0], of[1], chosen), permute(of[2], of[3], chosen), 0x5410u);
}

// The first number of i's warp: whole warps go on where there is i or more.
template <class I>
DEV I warp_of(I i) {
  return i & ~(I)31;
}

// The row of a four, of which each has so many.
DEV i64 coded_row(i64 four, i64 fours) {
  if (four < 0x7fffffff) return (u32)four / (u32)fours;  // 32-bit division is several times cheaper
  return four / fours;
}

// Codes of a row of k values, of which this lane has number `four` of its fours; the eight fours of
// a group are in lanes side by side, or STEP apart, and either all `there` or none. For whole warps.
// Lanes between those, where STEP is 4, have the same values in any order, and give nothing.
template <int STEP = 1>
DEV void give_codes(const float (&v)[4], bool there, Quad* codes, i64 k, i64 row, int four) {
  u32 bits = 0;  // of the largest: as integers, since what is no number is to be larger than all
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const u32 own = float_to_bits(v[e]) & 0x7fffffffu;
    bits = own > bits ? own : bits;
  }
#pragma unroll
  for (int lane = STEP; lane < 8 * STEP; lane *= 2) {
    const u32 other = SHUFFLE_XOR(bits, lane);
    bits = other > bits ? other : bits;
  }
  const float found = bits_to_float(bits), most = found < LEAST_MOST ? LEAST_MOST : found;
  const float unit = most / MOST_CODE, inverse = MOST_CODE / most;
  int code[4], sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    code[e] = nearest(v[e] * inverse);
    sum += code[e];
  }
  sum += SHUFFLE_XOR(sum, STEP);
  sum += SHUFFLE_XOR(sum, 2 * STEP);
  // Two lanes have the columns of two quads, and give one each.
  const int other_sum = SHUFFLE_XOR(sum, 4 * STEP), t = four % 4;
  const bool last = four / 4 % 2;
  const u32 high = bytes_of(code, 2), middle = bytes_of(code, 1), low = bytes_of(code, 0);
  const u32 other = SHUFFLE_XOR(last ? high : low, 4 * STEP);
  const u32 other_middle = SHUFFLE_XOR(middle, 4 * STEP);
  if (!there || threadIdx.x % STEP) return;
  const float total = (float)(other_sum + sum) * unit;
  const Quad first = {{high, other, middle, other_middle}};
  const Quad second = {{other, low, float_to_bits(unit), float_to_bits(total)}};
  Quad* group = codes + (row / 8 * ((u32)k / 32) + four / 8) * CODED_QUADS;  // k: fewer registers
  const int number = row % 8;
  group[last * 32 + number * 4 + t] = last ? second : first;
  if (last || t > 1) return;
  const float begin = (float)sum * unit, end = (float)other_sum * unit;
  const Pair pair = {{float_to_bits(t ? begin : unit), float_to_bits(t ? end : total)}};
  ((Pair*)(group + 64 + 4 * t))[number] = pair;
}

// Codes of y [k], which this block of whole warps has just written.
DEV void give_row_codes(const float* y, Quad* codes, i64 k, i64 row) {
  __syncthreads();
  for (i64 i = threadIdx.x; 4 * warp_of(i) < k; i += blockDim.x) {
    const bool there = 4 * i < k;
    float v[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (there) v[e] = y[4 * i + e];
    give_codes(v, there, codes, k, row, (int)i);
  }
}

// Codes of the group that a warp has, of columns from `column` of its lane on.
DEV void give_lanes_codes(float value, bool there, Quad* codes, i64 k, i64 row, int column) {
  const float v[4] = {value, SHUFFLE_XOR(value, 1), SHUFFLE_XOR(value, 2), SHUFFLE_XOR(value, 3)};
  give_codes<4>(v, there, codes, k, row, column / 4);
}
