// CUDA's built-ins for host C++: a block's threads are fibers that take turns on one CPU thread.
//
// A fiber runs until it meets a barrier (`__syncthreads`, or the exchange of a shuffle), so a
// missing barrier shows as a wrong value in most cases, and one that not all threads reach as a
// report. Blocks run one after another. Not modelled: memory ordering, divergence within a warp.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <utility>

#define DEV static inline
#define KERNEL extern "C" void
#define SHARED static
#define TABLE static const

namespace shim {
struct Index {
  unsigned x, y, z;
};
struct Fiber {
  ucontext_t first;
  jmp_buf at;
  Index thread;
  bool started, done;
};
static const int MOST = 1024, STACK = 1 << 16;
static Fiber fibers[MOST];
static char* stacks;
static jmp_buf home;
static int here, alive, count;
static void (*entry)(void*);
static void* argument;
static unsigned block_round, block_waiting, warp_round[MOST / 32], warp_waiting[MOST / 32];
static int warp_alive[MOST / 32];
static unsigned slots[2][MOST];
static Index block_index, block_size, grid_size;

static void leave() {
  if (!_setjmp(fibers[here].at)) _longjmp(home, 1);
}

// Returns when `needed` fibers have arrived; `round` counts how often that happened.
static void meet(unsigned& round, unsigned& waiting, const int& needed) {
  const unsigned mine = round;
  if (++waiting == (unsigned)needed) {
    waiting = 0;
    ++round;
  }
  while (round == mine) leave();
}

static void body() {
  for (;;) {
    entry(argument);
    fibers[here].done = true;
    --alive;
    --warp_alive[here / 32];
    if (alive && block_waiting == (unsigned)alive) {
      block_waiting = 0;
      ++block_round;
    }
    leave();
  }
}

static void begin(int i) {
  Fiber& f = fibers[i];
  getcontext(&f.first);
  f.first.uc_stack.ss_sp = stacks + (size_t)i * STACK;
  f.first.uc_stack.ss_size = STACK;
  f.first.uc_link = 0;
  makecontext(&f.first, body, 0);
  f.started = true;
}

static void resume(int i) {
  here = i;
  if (_setjmp(home)) return;
  if (fibers[i].started) _longjmp(fibers[i].at, 1);
  begin(i);
  setcontext(&fibers[i].first);
}

static void run_block(int threads) {
  if (!stacks) stacks = (char*)malloc((size_t)MOST * STACK);
  alive = count = threads;
  block_waiting = 0;
  for (int w = 0; w < threads / 32; ++w) warp_alive[w] = 32, warp_waiting[w] = 0;
  for (int i = 0; i < threads; ++i) fibers[i].done = false, fibers[i].thread = {(unsigned)i, 0, 0};
  for (int idle = 0; alive; ++idle) {
    const int before = alive;
    const unsigned round = block_round;
    unsigned warps = 0;
    for (int w = 0; w < threads / 32; ++w) warps += warp_round[w];
    for (int i = 0; i < threads; ++i)
      if (!fibers[i].done) resume(i);
    for (int w = 0; w < threads / 32; ++w) warps -= warp_round[w];
    if (before != alive || round != block_round || warps) idle = 0;
    if (idle > 4) {
      fprintf(stderr, "shim: a barrier is not reached by %d of %d threads\n", alive, count);
      abort();
    }
  }
}

template <class T>
static T exchange(T value, int offset) {
  static_assert(sizeof(T) == 4, "four bytes");
  const int warp = here / 32;
  unsigned* row = slots[warp_round[warp] & 1];  // the other row may still be read
  memcpy(&row[here], &value, 4);
  meet(warp_round[warp], warp_waiting[warp], warp_alive[warp]);
  T other;
  memcpy(&other, &row[here ^ offset], 4);
  return other;
}

static unsigned fragments[2][MOST][6];

// A warp's product of fragments, each lane with its registers (PTX, mma.m16n8k16). Row r of a is
// held by lanes r % 8 * 4 .. + 3, column c of b by lanes c * 4 .. + 3; a register has two columns
// (or rows) of k, and the second pair of registers those from 8 on.
static float lane_bf16(unsigned word, int k) {
  const unsigned bits = (k % 2 ? word >> 16 : word & 0xffffu) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void multiply(float* sum, const unsigned (&a)[4], const unsigned (&b)[2]) {
  const int warp = here / 32, first = warp * 32, lane = here % 32;
  unsigned(*held)[6] = fragments[warp_round[warp] & 1];
  memcpy(held[here], a, 16);
  memcpy(held[here] + 4, b, 8);
  meet(warp_round[warp], warp_waiting[warp], warp_alive[warp]);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float total = sum[i];
    for (int k = 0; k < 16; ++k) {
      const int t = k % 8 / 2, later = k / 8;
      const unsigned left = held[first + row % 8 * 4 + t][row / 8 + 2 * later];
      const unsigned right = held[first + column * 4 + t][4 + later];
      total += lane_bf16(left, k) * lane_bf16(right, k);
    }
    sum[i] = total;
  }
}

template <class... A, size_t... I>
static void unpack(void (*f)(A...), void** args, std::index_sequence<I...>) {
  f(*(A*)args[I]...);
}

template <class... A>
static void launch(void (*f)(A...), const unsigned* grid, unsigned threads, void** args) {
  struct Call {
    void (*f)(A...);
    void** args;
  } call = {f, args};
  entry = [](void* c) {
    unpack(((Call*)c)->f, ((Call*)c)->args, std::index_sequence_for<A...>());
  };
  argument = &call;
  block_size = {threads, 1, 1};
  grid_size = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        block_index = {x, y, z};
        run_block((int)threads);
      }
}
}  // namespace shim

#define threadIdx (shim::fibers[shim::here].thread)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
#define __syncthreads() shim::meet(shim::block_round, shim::block_waiting, shim::alive)
#define SHUFFLE_XOR(value, offset) shim::exchange(value, offset)
using shim::multiply;
#define HOST_ENTRY(name)                                                             \
  extern "C" void host_##name(const unsigned* grid, unsigned threads, void** args) { \
    shim::launch(name, grid, threads, args);                                         \
  }

static inline float bits_to_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline unsigned float_to_bits(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static inline float half_to_float(unsigned short h) {
  const unsigned sign = (unsigned)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return bits_to_float(sign | 0x7f800000u | m << 13);
  if (e) return bits_to_float(sign | (e + 112) << 23 | m << 13);
  const float tiny = (float)m * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -tiny : tiny;
}
static inline unsigned short float_to_half(float value) {  // to nearest even
  const unsigned bits = float_to_bits(value), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
  if (a > 0x7f800000u) return (unsigned short)(sign | 0x7e00);
  if (a >= 0x477ff000u) return (unsigned short)(sign | 0x7c00);
  if (a < 0x38800000u) {  // subnormal: the sum with 0.5 rounds at the right place
    const unsigned shifted = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;
    return (unsigned short)(sign | shifted);
  }
  const unsigned rounded = a + 0xfffu + (a >> 13 & 1u);
  return (unsigned short)(sign | (rounded - 0x38000000u) >> 13);
}
