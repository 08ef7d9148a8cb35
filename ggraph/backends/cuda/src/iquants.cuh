// I-quants: blocks of 256 values whose bytes are indices of rows of a grid, and signs; an odd integer
// times a float16 is the scale of 16 or 32 values. PLACES, of grid.cuh, has the rows of the grid of this
// unit's WEIGHT, four numbers a word: the place of each among the grid's levels, four bits of it.
// An octet is eight values from a multiple of eight on. Layouts: ggml `ggml-common.h`.
#pragma once
#include "grid.cuh"

struct Gridded : Block {
  static const int BLOCK = 256;
  static const bool FLOOR = false, LOOKS_UP = true;
  DEV u32 bytes(u32 codes) { return codes; }
};

// Four numbers of a grid, of which four bits tell which are negative. None is 0, so that nothing is
// carried.
DEV u32 with_signs(u32 sizes, u32 bits) {
  const u32 minus = bits_to_bytes(bits);
  return (sizes ^ minus * 255) + minus;
}
// Seven signs of an octet as eight: the number of minuses is even.
DEV u32 eight_signs(u32 seven) { return seven | (__popc(seven) & 1) << 7; }
// Those of octet o of 32 values, of a word of four times seven.
DEV u32 signs_in(u32 word, int o) { return eight_signs(word >> 7 * o & 127); }
// 2n + 1
DEV float odd(u32 n) { return (float)(2 * n + 1); }
// 8, 25, 43
DEV u32 twos(int four) { return permute(0x002b1908u, 0, PLACES[four]); }

struct iq2_xxs : Gridded {
  static const int BYTES = 66, SPAN = 32;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b) * odd(four_bytes<BYTES>(b + 6 + c % 32 / 4 * 8) >> 28) * 0.125f;
  }
  DEV u32 four(const u8* row, int e) {
    const u8* p = row + e / 256 * BYTES + 2 + e % 256 / 32 * 8;  // four indices, a word
    const int o = e % 32 / 8;
    return with_signs(twos(2 * p[o] + e % 8 / 4), signs_in(four_bytes<BYTES>(p + 4), o) >> e % 8);
  }
};
// Scales of four bits, one for 16 values; those of 32 are a byte.
DEV float nibble(const u8* scales, int sixteen) {
  return odd(scales[sixteen / 2] >> sixteen % 2 * 4 & 15);
}
struct iq2_xs : Gridded {
  static const int BYTES = 74, SPAN = 16;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b) * nibble(b + 66, c % 32 / 2) * 0.125f;
  }
  DEV u32 four(const u8* row, int e) {
    const u32 both = half_word_at(row + e / 256 * BYTES + 2 + e % 256 / 8 * 2);
    return with_signs(twos(2 * (both & 511) + e % 8 / 4), eight_signs(both >> 9) >> e % 8);
  }
};
struct iq2_s : Gridded {
  static const int BYTES = 82, SPAN = 16;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b) * nibble(b + 74, c % 32 / 2) * 0.125f;
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    const int o = e % 256 / 8;
    const int index = b[2 + o] | (b[66 + o / 4] >> o % 4 * 2 & 3) << 8;
    return with_signs(twos(2 * index + e % 8 / 4), (u32)b[34 + o] >> e % 8);
  }
};

// Rows of four numbers.
struct iq3_xxs : Gridded {
  static const int BYTES = 98, SPAN = 32;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b) * odd(four_bytes<BYTES>(b + 66 + c % 32 / 4 * 4) >> 28) * 0.25f;
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    e %= 256;  // levels 4, 12, 20, 28, 36, 44, 52, 62
    const u32 sizes = permute(0x1c140c04u, 0x3e342c24u, PLACES[b[2 + e / 4]]);
    return with_signs(sizes, signs_in(four_bytes<BYTES>(b + 66 + e / 32 * 4), e % 32 / 8) >> e % 8);
  }
};
struct iq3_s : Gridded {
  static const int BYTES = 110, SPAN = 32;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b) * nibble(b + 106, c % 32 / 4);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    e %= 256;  // levels 1, 3, 5, 7, 9, 11, 13, 15
    const int index = b[2 + e / 4] | (b[66 + e / 32] >> e % 32 / 4 & 1) << 8;
    const u32 sizes = permute(0x07050301u, 0x0f0d0b09u, PLACES[index]);
    return with_signs(sizes, (u32)b[74 + e / 8] >> e % 8);
  }
};

// Trits in eighths, moved up by one, or down: -7, 1, 9, or -9, -1, 7.
DEV u32 moved(int four, u32 down) { return permute(down ? 0x0007fff7u : 0x000901f9u, 0, PLACES[four]); }

struct iq1_s : Gridded {
  static const int BYTES = 50, SPAN = 32;
  // Of 32 values: three upper bits of four indices, a scale, and whether they move down.
  DEV u32 upper(const u8* b, int i) { return half_word_at(b + 34 + 2 * i); }
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b) * odd(upper(b, c % 32 / 4) >> 12 & 7) * 0.125f;
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    const int o = e % 256 / 8;
    const u32 word = upper(b, o / 4);
    const int index = b[2 + o] | (word >> o % 4 * 3 & 7) << 8;
    return moved(2 * index + e % 8 / 4, word >> 15);
  }
};
struct iq1_m : Gridded {
  static const int BYTES = 56, SPAN = 16;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const int s = c % 32 / 2;  // four scales of three bits are a half word, and above them a quarter of d
    const u32 first = word_at(b + 48), second = word_at(b + 52);
    const u32 d = (first >> 12 & 0xf) | (first >> 24 & 0xf0) | (second >> 4 & 0xf00) |
                  (second >> 16 & 0xf000);
    *step = half_to_float((u16)d) * odd(half_word_at(b + 48 + s / 4 * 2) >> s % 4 * 3 & 7) * 0.125f;
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    const int o = e % 256 / 8;
    const u32 upper = b[32 + o / 2] >> o % 2 * 4;  // three bits of the index, and whether it moves down
    return moved(2 * (b[o] | (upper & 7) << 8) + e % 8 / 4, upper & 8);
  }
};
