// The stored types: eight consecutive values of a row at a time, as `ggraph.formats.quants` has them.
//
// A chunk c of a row is its values 8c .. 8c+7; none crosses a scale. A value of a block type is
// step * code - floor, rounded after each operation (no fused multiply-add), so that it has the bits
// of the NumPy decoder. Codes are small integers, which bf16 holds exactly. A step spans SPAN values;
// types without FLOOR have none. Layouts: ggml `ggml-common.h`.
#pragma once
#include "common.cuh"

// Sixteen bytes of a plain type, where they may be read at once.
struct alignas(16) Quad {
  u32 w[4];
};
struct alignas(8) Pair {
  u32 w[2];
};
DEV bool is_whole(const void* p, int c, i64 k) {
  return 8 * c + 8 <= k && ((unsigned long long)p & 15) == 0;
}

// Four floats at a multiple of 16 bytes.
DEV void four_floats(const float* p, float* v) {
  const Quad four = *(const Quad*)p;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = bits_to_float(four.w[i]);
}

// Eight floats as values of a plain float type: at once where they begin at a multiple of 16 bytes.
DEV void store_eight(u8* p, int type, const float* v) {
  if ((unsigned long long)p & 15) {
#pragma unroll
    for (int i = 0; i < 8; ++i) store_plain(p + i * plain_size(type), type, v[i]);
    return;
  }
  Quad four;
  if (type != F32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) four.w[i] = half_pair(v[2 * i], v[2 * i + 1], type);
    *(Quad*)p = four;
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) four.w[i] = float_to_bits(v[4 * h + i]);
    ((Quad*)p)[h] = four;
  }
}

struct f32 {
  static const int BLOCK = 1, BYTES = 4, SPAN = 0;
  DEV void eight(const void* p, float* v) {
    four_floats((const float*)p, v);
    four_floats((const float*)p + 4, v + 4);
  }
  DEV void load(const u8* row, int c, i64 k, float* v) {
    const float* p = (const float*)row + 8 * c;
    if (is_whole(p, c, k)) {
      eight(p, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? p[i] : 0.0f;
  }
};
struct f16 {
  static const int BLOCK = 1, BYTES = 2, SPAN = 0;
  DEV void eight(const void* p, float* v) {
    const Quad a = *(const Quad*)p;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = half_to_float((u16)a.w[i]);
      v[2 * i + 1] = half_to_float((u16)(a.w[i] >> 16));
    }
  }
  DEV void load(const u8* row, int c, i64 k, float* v) {
    const u16* p = (const u16*)row + 8 * c;
    if (is_whole(p, c, k)) {
      eight(p, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? half_to_float(p[i]) : 0.0f;
  }
};
struct bf16 {
  static const int BLOCK = 1, BYTES = 2, SPAN = 0;
  DEV void eight(const void* p, float* v) {
    const Quad a = *(const Quad*)p;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = bits_to_float(a.w[i] << 16);
      v[2 * i + 1] = bits_to_float(a.w[i] & 0xffff0000u);
    }
  }
  DEV void load(const u8* row, int c, i64 k, float* v) {
    const u16* p = (const u16*)row + 8 * c;
    if (is_whole(p, c, k)) {
      eight(p, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 8 * c + i < k ? bf16_to_float(p[i]) : 0.0f;
  }
};

// Four bytes of a block whose size is BYTES, by the widest loads that its alignment allows.
template <int BYTES>
DEV u32 four_bytes(const u8* p) {
  if (BYTES % 4 == 0) return word_at(p);
  if (BYTES % 2 == 0) return half_word_at(p) | (u32)half_word_at(p + 2) << 16;
  return p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}

// Four of 16 signed bytes by the codes in four bytes: two tables of eight, of which bit 3 chooses.
DEV u32 levels_of(u32 codes, u32 a, u32 b, u32 c, u32 d) {
  const u32 low = codes & 0x07070707u, pairs = low | low >> 4;
  const u32 chosen = permute(pairs, 0, 0x4420u);
  const u32 upper = (codes >> 3 & 0x01010101u) * 255;
  return (permute(a, b, chosen) & ~upper) | (permute(c, d, chosen) & upper);
}
// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
DEV u32 nl_levels(u32 codes) {
  return levels_of(codes, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
}
// 0, 1, 2, 3, 4, 6, 8, 12 and their negatives
DEV u32 fp4_levels(u32 codes) {
  return levels_of(codes, 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
}

// Four bits as the lowest bits of four bytes.
DEV u32 bits_to_bytes(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Block types. `four` gives four stored codes from value e of a row on, one a byte, e a multiple of
// four. Codes of BITS bits mean their number less RAISED; without BITS, `bytes` says what four mean.
// Types that have `Scales` unpack those of half a block at a time, and have `four` of value e of a half.
// Those that look codes up in a table need more registers.
struct Block {
  static const int BITS = 0, RAISED = 0;
  static const bool UNPACKS = false, LOOKS_UP = false;
};

// Types of 32 values: value e % 32 is in the low or high nibble of one of 16 bytes.
template <int BYTES>
DEV u32 nibbles(const u8* quants, int e) {
  return four_bytes<BYTES>(quants + e % 16) >> e % 32 / 16 * 4 & 0x0f0f0f0fu;
}

struct q4_0 : Block {
  static const int BLOCK = 32, BYTES = 18, SPAN = 32, BITS = 4, RAISED = 8;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 4 * BYTES);
  }
  DEV u32 four(const u8* row, int e) { return nibbles<BYTES>(row + e / 32 * BYTES + 2, e); }
};
struct q4_1 : Block {
  static const int BLOCK = 32, BYTES = 20, SPAN = 32, BITS = 4;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
    *floor = -half_at(b + 2);
  }
  DEV u32 four(const u8* row, int e) { return nibbles<BYTES>(row + e / 32 * BYTES + 4, e); }
};
struct q5_0 : Block {
  static const int BLOCK = 32, BYTES = 22, SPAN = 32, BITS = 5, RAISED = 16;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 4 * BYTES);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 32 * BYTES;  // bit e % 32 of the word behind the scale
    return nibbles<BYTES>(b + 6, e) | bits_to_bytes((u32)b[2 + e % 32 / 8] >> e % 8) << 4;
  }
};
struct q5_1 : Block {
  static const int BLOCK = 32, BYTES = 24, SPAN = 32, BITS = 5;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 4 * BYTES;
    *step = half_at(b);
    *floor = -half_at(b + 2);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 32 * BYTES;
    return nibbles<BYTES>(b + 8, e) | bits_to_bytes((u32)b[4 + e % 32 / 8] >> e % 8) << 4;
  }
};
struct q8_0 : Block {
  static const int BLOCK = 32, BYTES = 34, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 4 * BYTES);
  }
  DEV u32 four(const u8* row, int e) {
    return four_bytes<BYTES>(row + e / 32 * BYTES + 2 + e % 32);
  }
  DEV u32 bytes(u32 codes) { return codes; }
};
struct iq4_nl : Block {
  static const int BLOCK = 32, BYTES = 18, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 4 * BYTES);
  }
  DEV u32 four(const u8* row, int e) { return nibbles<BYTES>(row + e / 32 * BYTES + 2, e); }
  DEV u32 bytes(u32 codes) { return nl_levels(codes); }
};
struct mxfp4 : Block {
  static const int BLOCK = 32, BYTES = 17, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u32 e = row[c / 4 * BYTES];  // half of 2^(e - 127); the two least are subnormal
    *step = bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  DEV u32 four(const u8* row, int e) { return nibbles<BYTES>(row + e / 32 * BYTES + 1, e); }
  DEV u32 bytes(u32 codes) { return fp4_levels(codes); }
};

// Types of 256 values.
struct q2_k : Block {
  static const int BLOCK = 256, BYTES = 84, SPAN = 16, BITS = 2;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const u8 packed = b[c % 32 / 2];
    *step = half_at(b + 80) * (float)(packed & 15);
    *floor = half_at(b + 82) * (float)(packed >> 4);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    e %= 256;
    return word_at(b + 16 + e / 128 * 32 + e % 32) >> e % 128 / 32 * 2 & 0x03030303u;
  }
};
struct q3_k : Block {
  static const int BLOCK = 256, BYTES = 110, SPAN = 16, BITS = 3, RAISED = 4;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const int s = c % 32 / 2;
    const u8* packed = b + 96;
    const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
    const int high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
    *step = half_at(b + 108) * (float)((low | high << 4) - 32);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    e %= 256;
    const u32 low = four_bytes<BYTES>(b + 32 + e / 128 * 32 + e % 32) >> e % 128 / 32 * 2;
    const u32 third = four_bytes<BYTES>(b + e % 32) >> e / 32;
    return (low & 0x03030303u) | (third & 0x01010101u) << 2;
  }
};
// Byte i of a word as a float; below 2^24 a float counts in ones.
DEV float raised_byte(u32 word, int i) {
  return bits_to_float(permute(word, 0x4b000000u, 0x7440u | (u32)i));
}
DEV float byte_of(u32 word, int i) { return raised_byte(word, i) - 8388608.0f; }
// What a block of Q4_K and Q5_K begins with: two float16, and eight steps and floors of six bits each.
// Here those of four groups, a byte each.
struct Sixes {
  float step, floor;
  u32 steps, floors;
};
DEV Sixes sixes_of(const u8* block, int second) {
  const Quad head = *(const Quad*)block;
  const u32 six = 0x3f3f3f3fu, four = 0x0f0f0f0fu, two = 0x30303030u;
  return {half_to_float((u16)head.w[0]), half_to_float((u16)(head.w[0] >> 16)),
          second ? (head.w[3] & four) | (head.w[1] >> 2 & two) : head.w[1] & six,
          second ? (head.w[3] >> 4 & four) | (head.w[2] >> 2 & two) : head.w[2] & six};
}
// Unit times byte i of a word by one multiply-add: what is raised is taken off exactly. An infinite
// unit gives no number, where `scaled`, which decodes, keeps it.
DEV float times_byte(float unit, u32 word, int i) {
  return fmaf(unit, raised_byte(word, i), -8388608.0f * unit);
}
DEV void scaled(const Sixes& all, int s, float* step, float* floor) {
  *step = all.step * byte_of(all.steps, s);
  *floor = all.floor * byte_of(all.floors, s);
}
struct Sixed : Block {
  static const bool UNPACKS = true;
  typedef Sixes Scales;
  DEV Scales scales(const u8* block, int half) { return sixes_of(block, half); }
  DEV void scale(const Scales& all, int g, int s, float* step, float* floor) {
    *step = times_byte(all.step, all.steps, g);
    *floor = times_byte(all.floor, all.floors, g);
  }
};
struct q4_k : Sixed {
  static const int BLOCK = 256, BYTES = 144, SPAN = 32, BITS = 4;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    scaled(sixes_of(row + c / 32 * BYTES, c % 32 / 16), c % 16 / 4, step, floor);
  }
  DEV u32 four(const u8* block, int half, int e) {
    return word_at(block + 16 + 64 * half + e / 64 * 32 + e % 32) >> e % 64 / 32 * 4 & 0x0f0f0f0fu;
  }
  DEV u32 four(const u8* row, int e) {
    return four(row + e / 256 * BYTES, e % 256 / 128, e % 128);
  }
  using Sixed::scale;
};
struct q5_k : Sixed {
  static const int BLOCK = 256, BYTES = 176, SPAN = 32, BITS = 5;
  static const bool FLOOR = true;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    scaled(sixes_of(row + c / 32 * BYTES, c % 32 / 16), c % 16 / 4, step, floor);
  }
  DEV u32 four(const u8* block, int half, int e) {
    const u32 low = word_at(block + 48 + 64 * half + e / 64 * 32 + e % 32) >> e % 64 / 32 * 4;
    const u32 high = word_at(block + 16 + e % 32) >> 4 * half;
    return (low & 0x0f0f0f0fu) | (high >> e / 32 & 0x01010101u) << 4;
  }
  DEV u32 four(const u8* row, int e) {
    return four(row + e / 256 * BYTES, e % 256 / 128, e % 128);
  }
  using Sixed::scale;
};
struct q6_k : Block {
  static const int BLOCK = 256, BYTES = 210, SPAN = 16, BITS = 6, RAISED = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    *step = half_at(b + 208) * (float)((const i8*)b)[192 + c % 32 / 2];
  }
  DEV u32 four(const u8* block, int half, int e) {
    const u32 low = four_bytes<BYTES>(block + 64 * half + e % 64) >> e / 64 * 4;
    const u32 high = four_bytes<BYTES>(block + 128 + 32 * half + e % 32) >> e / 32 * 2;
    return (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
  }
  DEV u32 four(const u8* row, int e) {
    return four(row + e / 256 * BYTES, e % 256 / 128, e % 128);
  }
  static const bool UNPACKS = true;
  struct Scales {
    float unit;
    const u8* steps;  // signed
  };
  DEV Scales scales(const u8* block, int half) {
    return {half_at(block + 208), block + 192 + 8 * half};
  }
  DEV void scale(const Scales& all, int g, int s, float* step, float* floor) {
    *step = all.unit * (float)(i8)all.steps[2 * g + s];
  }
};
struct iq4_xs : Block {
  static const int BLOCK = 256, BYTES = 136, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u8* b = row + c / 32 * BYTES;
    const int s = c % 32 / 4;
    const int low = b[4 + s / 2] >> (s % 2 * 4) & 15;
    const int high = half_word_at(b + 2) >> 2 * s & 3;
    *step = half_at(b) * (float)((low | high << 4) - 32);
  }
  DEV u32 four(const u8* row, int e) {
    return nibbles<BYTES>(row + e / 256 * BYTES + 8 + 16 * (e % 256 / 32), e);
  }
  DEV u32 bytes(u32 codes) { return nl_levels(codes); }
};

// Trits: 0, 1 or 2 for -d, 0 and d. TQ1_0 has five to a byte, as a fraction of 256 in base 3.
struct tq1_0 : Block {
  static const int BLOCK = 256, BYTES = 54, SPAN = 32, BITS = 2, RAISED = 1;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 32 * BYTES + 52);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    e %= 256;  // four values have the same digit of four bytes
    const int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
    const u8* p = b + (e < 160 ? e % 32 : e < 240 ? 32 + e % 16 : 48);
    u32 codes = 0;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 t = p[i];
      for (int j = 0; j < digit; ++j) t = t * 3 & 255;  // what is carried out is gone
      codes |= (t * 3 >> 8) << 8 * i;
    }
    return codes;
  }
};
struct tq2_0 : Block {
  static const int BLOCK = 256, BYTES = 66, SPAN = 32, BITS = 2, RAISED = 1;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 32 * BYTES + 64);
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 256 * BYTES;
    e %= 256;
    return four_bytes<BYTES>(b + e / 128 * 32 + e % 32) >> e % 128 / 32 * 2 & 0x03030303u;
  }
};

// Sixteen values have a scale of eight bits: seven of the form of float16 with a shorter fraction.
struct nvfp4 : Block {
  static const int BLOCK = 64, BYTES = 36, SPAN = 16;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    const u32 code = row[c / 8 * BYTES + c % 8 / 2];  // 127 means 0, 255 does not
    *step = code == 127 ? 0.0f : half_to_float((u16)((code & 127) << 7)) * 128.0f;
  }
  DEV u32 four(const u8* row, int e) {
    const u8* b = row + e / 64 * BYTES;
    return word_at(b + 4 + e % 64 / 16 * 8 + e % 8) >> e % 16 / 8 * 4 & 0x0f0f0f0fu;
  }
  DEV u32 bytes(u32 codes) { return fp4_levels(codes); }
};
// A bit is d or, where it is not set, -d.
struct q1_0 : Block {
  static const int BLOCK = 128, BYTES = 18, SPAN = 32;
  static const bool FLOOR = false;
  DEV void scale(const u8* row, int c, float* step, float* floor) {
    *step = half_at(row + c / 16 * BYTES);
  }
  DEV u32 four(const u8* row, int e) {
    return bits_to_bytes((u32)row[e / 128 * BYTES + 2 + e % 128 / 8] >> e % 8);
  }
  DEV u32 bytes(u32 codes) { return codes | (codes ^ 0x01010101u) * 255; }
};

#if __has_include("grid.cuh")  // where WEIGHT is an i-quant (see `headers` of kernels.py)
#include "iquants.cuh"
#endif

// What four stored codes mean, as signed bytes.
template <class T>
DEV u32 signed_bytes(u32 stored) {
  if constexpr (T::BITS == 0) return T::bytes(stored);
  else if constexpr (T::RAISED == 0) return stored;
  else return stored + (128 - T::RAISED) * 0x01010101u ^ 0x80808080u;  // nothing is carried
}

// Chunk c of a row of k values of any type.
template <class T>
DEV void load_chunk(const u8* row, int c, i64 k, float* v) {
  if constexpr (T::SPAN == 0) {
    T::load(row, c, k, v);
  } else {
    float step, floor;
    T::scale(row, c, &step, &floor);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 codes = signed_bytes<T>(T::four(row, 8 * c + 4 * h));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = v[4 * h + i];
        value = step * (float)(i8)(codes >> 8 * i);
        if (T::FLOOR) value = value - floor;
      }
    }
  }
}

// Bytes of a row of k values.
template <class T>
DEV i64 row_bytes(i64 k) {
  return k / T::BLOCK * T::BYTES;
}
