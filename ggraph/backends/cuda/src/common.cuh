// What every kernel file shares: types, conversions, fixed-order reductions.
//
// No header of the CUDA toolkit is needed, so NVRTC alone compiles these files. With GGRAPH_HOST
// the same text is host C++ (tests run it that way); the shim then stands in for the built-ins.
#pragma once

// The most threads of a block; a file may promise less, so that its kernels may use more registers.
#ifndef MOST_THREADS
#define MOST_THREADS 1024
#endif

#ifdef GGRAPH_HOST
#include "shim.h"
#else
#define DEV static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(MOST_THREADS)
// One of blocks of so many threads, so many of which a multiprocessor is to hold: what registers a
// thread may use follows from that.
#define KERNEL_OF(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define SHARED __shared__
// Loads behind it are not begun before it, where they would take more registers than there are.
#define LOADS_IN_ORDER() asm volatile("" : : : "memory")
#define SYNC_WARP() __syncwarp()
// A launch may begin before the one behind which it was enqueued has ended, and waits here for that
// and for all that it wrote; what is enqueued behind may then begin likewise.
#if __CUDA_ARCH__ >= 900
#define FOLLOW() asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" : : : "memory")
#else
#define FOLLOW() (void)0
#endif
#define TABLE static __device__ const
#define FULL_WARP 0xffffffffu
DEV float bits_to_float(unsigned bits) { return __uint_as_float(bits); }
DEV unsigned float_to_bits(float value) { return __float_as_uint(value); }
DEV float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DEV unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#define SHUFFLE_XOR(value, offset) __shfl_xor_sync(FULL_WARP, value, offset)
// Which lanes of the warp have the same value, as bits.
#define ALIKE(value) __match_any_sync(FULL_WARP, value)
// Two floats rounded to bf16 in one word, the first in the lower half.
DEV unsigned bf16_pair(float first, float second) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
DEV unsigned f16_pair(float first, float second) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
// Four of the eight bytes of `low` and `high`, by the digits of `chosen`, the lowest first.
DEV unsigned permute(unsigned low, unsigned high, unsigned chosen) {
  unsigned word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(chosen));
  return word;
}
// sum [16, 8] += a [16, 16] . b [16, 8], spread over the lanes of a warp as PTX says
#define MULTIPLY(name, type)                                                            \
  DEV void name(float* sum, const unsigned (&a)[4], const unsigned (&b)[2]) {           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                  \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));            \
  }
MULTIPLY(multiply, "bf16")
MULTIPLY(multiply_f16, "f16")
// The same of bytes, a signed and b by name, summed as integers; columns of a are 32, or 16.
#define MULTIPLY_32(name, type)                                                         \
  DEV void name(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {      \
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8." type ".s32 "                        \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                \
  }
MULTIPLY_32(multiply_s8, "s8")
MULTIPLY_32(multiply_u8, "u8")
#define MULTIPLY_16(name, type)                                                         \
  DEV void name(int (&sum)[4], unsigned a0, unsigned a1, unsigned b) {                  \
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8." type ".s32 "                        \
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                           \
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])                        \
        : "r"(a0), "r"(a1), "r"(b));                                                    \
  }
MULTIPLY_16(multiply_s8_16, "s8")
MULTIPLY_16(multiply_u8_16, "u8")
// Sixteen bytes of global memory on their way into shared memory, both at multiples of 16; they are
// there, for the thread itself, behind `copies_done`.
DEV void copy_16(void* shared, const void* from) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(at), "l"(from) : "memory");
}
DEV void copies_done() { asm volatile("cp.async.wait_all;" : : : "memory"); }
// Shared memory of one object, whose size the host reads off `NAME_shared` of the kernel's name: more
// than the 48 KB that a kernel may declare.
#define SHARES(kernel, type) \
  extern "C" { __constant__ unsigned kernel##_shared = sizeof(type); }
#define SHARED_OBJECT(type, name)                        \
  extern __shared__ __align__(16) unsigned char whole[]; \
  type& name = *(type*)whole
// Begin to bring bytes to the L2 cache, and go on.
DEV void ask_for(const void* from, int bytes) {
  for (int at = 0; at < bytes; at += 64)
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)from + at));
}
#endif

// The most of it, in KB: of GPUs for data centres, and of others.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define MOST_SHARED 227
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870)
#define MOST_SHARED 163
#else
#define MOST_SHARED 99
#endif

// Halves of a segment of products that are written out one behind the other (tiles.cu): what registers
// of a GPU's compiler allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define WRITTEN_OUT 1
#else
#define WRITTEN_OUT 2
#endif

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define INF bits_to_float(0x7f800000u)

// Four sizes or byte strides, outermost first; absent axes are 1 (sizes) or 0 (strides).
struct Axes {
  i64 v[4];
};

// Plain storage types as the host names them (see layout.py).
enum Plain { F32 = 0, F16 = 1, BF16 = 2, I32 = 3, I64 = 4 };

DEV u32 word_at(const u8* p) { return *(const u32*)p; }
DEV u16 half_word_at(const u8* p) { return *(const u16*)p; }
DEV float half_at(const u8* p) { return half_to_float(half_word_at(p)); }

DEV float bf16_to_float(u16 bits) { return bits_to_float((u32)bits << 16); }

// Rounded to nearest even; a NaN stays a quiet one.
DEV u16 float_to_bf16(float value) {
  u32 bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 64u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef GGRAPH_HOST
DEV void ask_for(const void*, int) {}
DEV u32 permute(u32 low, u32 high, u32 chosen) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  u32 word = 0;
  for (int i = 0; i < 4; ++i) word |= (u32)(both >> 8 * (chosen >> 4 * i & 7) & 255) << 8 * i;
  return word;
}
DEV u32 bf16_pair(float first, float second) {
  return (u32)float_to_bf16(first) | (u32)float_to_bf16(second) << 16;
}
DEV u32 f16_pair(float first, float second) {
  return (u32)float_to_half(first) | (u32)float_to_half(second) << 16;
}
#endif

// A value of a float type in two steps, neither of which branches: so many loads go out at once.
DEV u32 float_bits_at(const u8* p, int type) { return type == F32 ? word_at(p) : half_word_at(p); }
DEV float float_of(u32 bits, int type) {
  return type == F32   ? bits_to_float(bits)
         : type == F16 ? half_to_float((u16)bits)
                       : bf16_to_float((u16)bits);
}

DEV void store_float(u8* p, int type, float value) {
  if (type == F32) *(float*)p = value;
  else *(u16*)p = type == F16 ? float_to_half(value) : float_to_bf16(value);
}

DEV float load_plain(const u8* p, int type) {
  if (type == F32) return *(const float*)p;
  if (type == F16) return half_at(p);
  if (type == BF16) return bf16_to_float(half_word_at(p));
  if (type == I32) return (float)*(const int*)p;
  return (float)*(const i64*)p;
}

DEV void store_plain(u8* p, int type, float value) {
  if (type == I32) *(int*)p = (int)value;
  else if (type == I64) *(i64*)p = (i64)value;
  else store_float(p, type, value);
}

// The same of a plain float type.
DEV float float_at(const u8* p, int type) {
  return type == F32 ? *(const float*)p : type == F16 ? half_at(p) : bf16_to_float(half_word_at(p));
}

// Two floats as values of a 16-bit type in one word, the first in the lower half.
DEV u32 half_pair(float first, float second, int type) {
  return type == F16 ? f16_pair(first, second) : bf16_pair(first, second);
}

DEV i64 load_index(const u8* p, int type, i64 i) {
  return type == I32 ? (i64)((const int*)p)[i] : ((const i64*)p)[i];
}

// Whether one of the rows behind t goes to the same place as t: of those the last stays.
DEV bool is_followed(const u8* index, int type, i64 t, i64 rows, i64 place) {
  bool followed = false;  // no way out on the way: loads need not wait for one another
#pragma unroll 4
  for (i64 later = t + 1; later < rows; ++later)
    followed |= load_index(index, type, later) == place;
  return followed;
}

DEV int plain_size(int type) { return type == F32 || type == I32 ? 4 : type == I64 ? 8 : 2; }

// Byte offset of element i (row-major over n) under byte strides s.
DEV i64 place_of(u32 i, const Axes& n, const Axes& s) {
  if (i < n.v[3]) return i * s.v[3];
  const u32 d = i % (u32)n.v[3];  // 32-bit division is several times cheaper
  i /= (u32)n.v[3];
  const u32 c = i % (u32)n.v[2];
  i /= (u32)n.v[2];
  const u32 b = i % (u32)n.v[1];
  return d * s.v[3] + c * s.v[2] + b * s.v[1] + (i64)(i / (u32)n.v[1]) * s.v[0];
}

DEV i64 place_of(i64 i, const Axes& n, const Axes& s) {
  if (i < 0x7fffffff) return place_of((u32)i, n, s);
  const i64 d = i % n.v[3], c = i / n.v[3] % n.v[2], b = i / (n.v[3] * n.v[2]) % n.v[1];
  return d * s.v[3] + c * s.v[2] + b * s.v[1] + i / (n.v[3] * n.v[2] * n.v[1]) * s.v[0];
}

// Sum over a warp; every lane gets it, always in the same order of additions.
DEV float warp_sum(float value) {
  for (int offset = 16; offset; offset >>= 1) value += SHUFFLE_XOR(value, offset);
  return value;
}

// Sum over the four lanes that share a row of a fragment.
DEV float four_sum(float value) {
  for (int offset = 1; offset < 4; offset *= 2) value += SHUFFLE_XOR(value, offset);
  return value;
}

DEV float warp_max(float value) {
  for (int offset = 16; offset; offset >>= 1) {
    const float other = SHUFFLE_XOR(value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// What each warp of a block has, of which a lane gets one; `none` where there is none. `part` is
// shared and holds one float per warp.
DEV float of_warps(float value, float none, float* part) {
  __syncthreads();  // readers of an earlier use, where there was one
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : none;
}

// Sum over a block of whole warps, always in the same order of additions.
DEV float block_sum(float value, float* part) {
  return warp_sum(of_warps(warp_sum(value), 0.0f, part));
}

DEV float block_max(float value, float* part) {
  return warp_max(of_warps(warp_max(value), -INF, part));
}
