// Products of block types, by integers: x in codes of 20 bits (parts.cuh), weights by their own codes,
// signed bytes. What tensor cores sum over a span of 32 or 16 columns is exact, and so the same
// however it is added up; each span's sum is scaled in float32.
// Legend: g, t: a lane's place in a fragment, which has rows g and g + 8 of w and columns 4t .. and
// 16 + 4t .. of a group of 32; its results are of rows 2t and 2t + 1 of x.
#pragma once
#include "parts.cuh"

// What a lane holds of a group of two rows of w, for any number of rows of x.
template <class T>
struct Coded {
  static const int SPANS = 32 / T::SPAN;
  u32 a[4];  // of both rows, first of the first half of columns
  float step[SPANS][2], floor[SPANS][2];
};

// Codes that four(row, half) gives, and steps and floors of scale(row, span, ..).
template <class T, class Four, class Scale>
DEV void hold(Four four, Scale scale, Coded<T>& held) {
#pragma unroll
  for (int i = 0; i < 4; ++i) held.a[i] = signed_bytes<T>(four(i % 2, i / 2));
#pragma unroll
  for (int s = 0; s < Coded<T>::SPANS; ++s)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      held.floor[s][r] = 0.0f;
      scale(r, s, &held.step[s][r], &held.floor[s][r]);
    }
}

// Units and sums of x, of a span, that a lane's results need.
struct Units {
  float unit[2], sum[2];
};

// sum += step * unit * (codes of w . codes of x) - floor * (sum of x), of span s. ONE: of row 2t alone.
template <class T, bool ONE>
DEV void add_span(const Coded<T>& held, int s, const Quad& high, const Quad& low, const Units& of,
                  float* sum) {
  // Byte by byte of x, the highest first: 32 * 128 * (2^19 - 1) at most. Shifts of what rows that do not
  // exist may hold are of unsigned numbers.
  int total[4] = {};
  auto shift = [&] {
#pragma unroll
    for (int i = 0; i < 4; i += ONE ? 2 : 1) total[i] = (int)((u32)total[i] << 8);
  };
  if constexpr (T::SPAN == 32) {
    multiply_s8(total, held.a, high.w[0], high.w[1]);
    shift();
    multiply_u8(total, held.a, high.w[2], high.w[3]);
    shift();
    multiply_u8(total, held.a, low.w[0], low.w[1]);
  } else {
    const u32 upper = held.a[2 * s], lower = held.a[2 * s + 1];
    multiply_s8_16(total, upper, lower, high.w[s]);
    shift();
    multiply_u8_16(total, upper, lower, high.w[2 + s]);
    shift();
    multiply_u8_16(total, upper, lower, low.w[s]);
  }
#pragma unroll
  for (int i = 0; i < 4; i += ONE ? 2 : 1) {
    sum[i] = fmaf((float)total[i], held.step[s][i / 2] * of.unit[i % 2], sum[i]);
    if (T::FLOOR) sum[i] = fmaf(-held.floor[s][i / 2], of.sum[i % 2], sum[i]);
  }
}

// Where in x a lane finds rows at group 0: that which it multiplies, in quads; and those that its
// results are of, in pairs of a unit and a sum. Distances take fewer registers than pointers.
struct Lanes {
  const Quad* x;
  u32 own, first, second;
};

DEV Lanes lanes_of(const Quad* x, i64 k, i64 own, i64 first, i64 second) {
  auto group = [&](i64 row) { return (u32)(row / 8 * (k / 32) * CODED_QUADS); };
  auto pair = [&](i64 row) { return 2 * (group(row) + 64) + (u32)row % 8; };
  return {x, group(own) + (u32)own % 8 * 4 + threadIdx.x % 4, pair(first), pair(second)};
}

// What a lane multiplies of a group.
struct Pieces {
  Quad high, low;
};
DEV Pieces pieces_at(const Lanes& lanes, int from) {
  const Quad* own = lanes.x + (lanes.own + from);
  return {own[0], own[32]};
}

// sum += the group that is held . rows of x, `from` quads on, of which this lane multiplies `own`. NEAR:
// rows of results lie side by side.
template <class T, bool ONE, bool NEAR>
DEV void add_group(const Coded<T>& held, const Lanes& lanes, int from, const Pieces& own,
                   float* sum) {
  const bool halves = T::FLOOR && T::SPAN == 16;
  auto two = [&](int behind) {  // two pairs, `behind` those of units
    const Pair* pairs = (const Pair*)(lanes.x + (from + behind));
    if (NEAR) return *(const Quad*)(pairs + lanes.first);
    const Pair first = pairs[lanes.first], second = pairs[lanes.second];
    return Quad{{first.w[0], first.w[1], second.w[0], second.w[1]}};
  };
  Quad units;
  if (ONE) units.w[0] = own.low.w[2], units.w[1] = own.low.w[3];  // where t is 0, whose results stay
  else units = two(0);
  Quad sums;
  if (halves) sums = two(4);
#pragma unroll
  for (int s = 0; s < Coded<T>::SPANS; ++s) {
    Units of;
#pragma unroll
    for (int r = 0; r < (ONE ? 1 : 2); ++r) {
      of.unit[r] = bits_to_float(units.w[2 * r]);
      of.sum[r] = bits_to_float(halves ? sums.w[2 * r + s] : units.w[2 * r + 1]);
    }
    add_span<T, ONE>(held, s, own.high, own.low, of, sum);
  }
}

// Calls add(number of a group within its segment, what is held of it) for all groups of a segment of
// two rows of w that are among `left`; AT_ONCE of a half's and BEHIND halves are written out, as
// registers allow.
template <class T, int AT_ONCE, int BEHIND, class Add>
DEV void each_group(const u8* const (&rows)[2], int left, Add add) {
  const int t = threadIdx.x % 4;
#pragma unroll(BEHIND)
  for (int half = 0; half < 2 && (T::BLOCK == 256 || 4 * half < left); ++half) {
    // By four(row, value of the half segment) and scale(group of the half, row, span, ..).
    auto four_groups = [&](auto four, auto scale) {
#pragma unroll AT_ONCE
      for (int i = 0; i < 4; ++i) {
        if (T::BLOCK < 256 && 4 * half + i >= left) return;
        Coded<T> held;
        hold<T>([&](int r, int h) { return four(r, 32 * i + 16 * h + 4 * t); },
                [&](int r, int s, float* step, float* floor) { scale(i, r, s, step, floor); }, held);
        add(4 * half + i, held);
      }
    };
    if constexpr (T::UNPACKS) {
      const typename T::Scales all[2] = {T::scales(rows[0], half), T::scales(rows[1], half)};
      four_groups([&](int r, int e) { return T::four(rows[r], half, e); },
                  [&](int i, int r, int s, float* step, float* floor) {
                    T::scale(all[r], i, s, step, floor);
                  });
    } else {
      four_groups([&](int r, int e) { return T::four(rows[r], 128 * half + e); },
                  [&](int i, int r, int s, float* step, float* floor) {
                    T::scale(rows[r], 16 * half + 4 * i + 2 * s, step, floor);
                  });
    }
  }
}
