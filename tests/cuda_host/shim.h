// CUDA's built-ins for host C++: a block's threads are fibers that take turns on one CPU thread.
//
// A fiber runs until it meets a barrier (`__syncthreads`, or the exchange of a shuffle). Fibers take
// turns, and blocks follow one another, in an order that `launch` is given: ascending; descending, a
// warp at a time as far as it gets; or shuffled by a seed; so a missing barrier shows as a wrong
// value. Or blocks run side by side, as they do on a GPU with room for all: every thread of every
// block has a turn before any has its next. What a GPU leaves undefined or
// refuses ends the launch with a report: an access outside all buffers or at a wrong alignment, an
// index outside an array, a barrier or a shuffle that some threads do not reach, or reach elsewhere.
// Shared memory begins every block as NaN. Not modelled: memory ordering.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <utility>

extern "C" __attribute__((weak, visibility("hidden"))) char __start_block_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_block_shared[];

#define DEV static inline
#define KERNEL extern "C" void
#define KERNEL_OF(threads, blocks) KERNEL
#define SHARED __attribute__((section("block_shared"))) static
#define LOADS_IN_ORDER() (void)0
#define FOLLOW() (void)0
#define SHARES(kernel, type)
#define SHARED_OBJECT(type, name) SHARED type name
#define TABLE static const

namespace shim {
struct Index {
  unsigned x, y, z;
};
typedef void* Place[5];  // where to go on, as the compiler keeps it: sooner there than by setjmp
struct Fiber {
  Place at;
  Index thread;
  bool started, done;
  const unsigned* round;  // of the meeting it waits at: no turn before that is another than `seen`
  unsigned seen;
  bool waits() const { return round && *round == seen; }
};
// Stacks begin at places of their own in a cache: a power of two apart, they would share a few.
static const int MOST = 1024, STACK = (1 << 16) + 448, WARP = 32;
static Fiber fibers[MOST];
static int turns[MOST];  // the order in which fibers take turns
static char* stacks;
static Place home;
static sigjmp_buf outside;
static char report[200];
static int here, alive, count;  // all of them in the blocks that run
static unsigned events;  // meetings that ended, and turns in which a thread only let time pass
static bool at_once;     // whether blocks run side by side
static const unsigned SIDE_BY_SIDE = 0xFFFFFFFFu;  // an order of blocks and threads
static const unsigned FIRST_ALONE = ~1u;  // the first block and no other
static void (*entry)(void*);
static void* argument;
// Those who wait for one another: how often that ended, who waits, and where in the source.
struct Meeting {
  unsigned round, waiting;
  int site;
};
static Meeting warp_meetings[MOST / WARP];
static int warp_alive[MOST / WARP];
static unsigned slots[2][MOST];
struct Block {
  Index index;
  Meeting meeting;
  int alive;
  char* shared;  // while another block runs
};
static Block blocks[MOST / WARP], *block = blocks;  // of the fiber that runs
static Index block_size, grid_size;

[[noreturn]] static void fail(const char* what) {
  snprintf(report, sizeof report, "%s (block %u %u %u, thread %d)", what, block->index.x,
           block->index.y, block->index.z, here % (int)block_size.x);
  siglongjmp(outside, 1);
}

static void caught(int number, siginfo_t* about, void*) {
  char what[100];
  snprintf(what, sizeof what,
           number == SIGILL ? "undefined: alignment, index, shift or overflow"
                            : "access outside all buffers, at %p", about->si_addr);
  fail(what);
}

[[noreturn, gnu::noinline]] static void go(Place& to) { __builtin_longjmp(to, 1); }

static int turn, last_turn;  // places in the order: whose turn it is, and where these turns end

// On to the next fiber in the order; by home where there is none, or it needs more than a jump.
[[noreturn, gnu::noinline]] static void pass_on() {
  for (; !at_once && turn + 1 < last_turn; ++turn) {
    Fiber& next = fibers[turns[turn + 1]];
    if (next.done || next.waits()) continue;
    if (!next.started) break;
    here = turns[++turn];
    go(next.at);
  }
  go(home);
}

[[gnu::noinline]] static void leave() {
  if (!__builtin_setjmp(fibers[here].at)) pass_on();
}

// Returns when `needed` fibers have arrived, all at one `site`.
static void meet(Meeting& m, const int& needed, int site) {
  const unsigned mine = m.round;
  if (m.waiting && m.site != site) fail("threads meet at different barriers");
  m.site = site;
  if (++m.waiting == (unsigned)needed) {
    m.waiting = 0;
    ++m.round, ++events;
    if (at_once) leave();  // the last to arrive is not ahead of other blocks
    return;
  }
  fibers[here].round = &m.round, fibers[here].seen = mine;
  leave();
  fibers[here].round = 0;
}

static void body() {
  for (;;) {
    entry(argument);
    fibers[here].done = true;
    --alive;
    --warp_alive[here / WARP];
    if (--block->alive && block->meeting.waiting == (unsigned)block->alive) {
      block->meeting.waiting = 0;
      ++block->meeting.round, ++events;
    }
    leave();
  }
}

[[noreturn]] static void begin(int i) {
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = stacks + (size_t)i * STACK;
  first.uc_stack.ss_size = STACK;
  first.uc_link = 0;
  makecontext(&first, body, 0);
  fibers[i].started = true;
  setcontext(&first);
  abort();
}

static size_t shared_bytes() {
  return __start_block_shared ? (size_t)(__stop_block_shared - __start_block_shared) : 0;
}

// Shared memory has one place, which the block that runs has.
static void enter(Block* next) {
  if (next == block) return;
  if (const size_t size = shared_bytes()) {
    memcpy(block->shared, __start_block_shared, size);
    memcpy(__start_block_shared, next->shared, size);
  }
  block = next;
}

[[gnu::noinline]] static void resume(int i) {
  here = i;
  enter(blocks + i / (int)block_size.x);
  if (__builtin_setjmp(home)) return;
  if (fibers[here].started) go(fibers[here].at);
  begin(here);
}

// A turn of the threads whose places in the order are warp w's; where they are `hurried`, turns until
// they wait for the block or are done.
static void run_warp(int w, bool hurried) {
  for (int before = -1, rounds = 0; before != alive || rounds != (int)events;) {
    before = alive, rounds = (int)events;
    last_turn = (w + 1) * WARP;
    for (turn = w * WARP; turn < last_turn; ++turn)
      if (!fibers[turns[turn]].done && !fibers[turns[turn]].waits()) resume(turns[turn]);
    if (!hurried) return;
  }
}

// Copies into shared memory that a thread has begun: done as late as may be.
struct Copy {
  void* to;
  const void* from;
};
static const int MOST_COPIES = 64;
static Copy copies[MOST][MOST_COPIES];
static int begun[MOST];

static void copy_16(void* shared, const void* from) {
  if (((size_t)shared | (size_t)from) & 15) fail("a copy that is not aligned");
  if (begun[here] == MOST_COPIES) fail("more copies at once than the stand-in holds");
  copies[here][begun[here]++] = {shared, from};
}

static void copies_done() {
  for (int i = 0; i < begun[here]; ++i) memcpy(copies[here][i].to, copies[here][i].from, 16);
  begun[here] = 0;
}

// The first `several` of `blocks`, side by side.
static void run_blocks(int several, int threads, bool hurried) {
  if (!stacks) stacks = (char*)malloc((size_t)MOST * STACK);
  const size_t size = shared_bytes();
  for (Block* b = blocks; b < blocks + several; ++b) {
    b->meeting.waiting = 0;
    b->alive = threads;
    if (size && !b->shared) b->shared = (char*)malloc(size);
    if (size) memset(b->shared, 0xFF, size);
  }
  if (size) memset(__start_block_shared, 0xFF, size);
  block = blocks;
  alive = count = several * threads;
  const int warps = count / WARP;
  for (int w = 0; w < warps; ++w) warp_alive[w] = WARP, warp_meetings[w].waiting = 0;
  for (int i = 0; i < count; ++i) {
    fibers[i].done = false, fibers[i].round = 0, fibers[i].thread = {(unsigned)(i % threads), 0, 0};
    begun[i] = 0;
  }
  for (int idle = 0; alive; ++idle) {
    const int before = alive;
    const unsigned rounds = events;
    for (int w = 0; w < warps; ++w) run_warp(w, hurried);
    if (before != alive || rounds != events) idle = 0;
    if (idle > 4) fail("a barrier is not reached by all threads");
  }
}

// Time passes while other threads have their turns.
static void nap() {
  ++events;
  leave();
}

// Whole warps alone: what a missing lane would have given is undefined.
static void meet_warp(int site) {
  const int warp = here / WARP;
  if (warp_alive[warp] != WARP) fail("a shuffle of a warp that is not whole");
  meet(warp_meetings[warp], WARP, site);
}

template <class T>
static T exchange(T value, int offset, int site) {
  static_assert(sizeof(T) == 4, "four bytes");
  unsigned* row = slots[warp_meetings[here / WARP].round & 1];  // the other row may still be read
  memcpy(&row[here], &value, 4);
  meet_warp(site);
  T other;
  memcpy(&other, &row[here ^ offset], 4);
  return other;
}

// Which lanes have the same value, as bits.
static unsigned alike(int value, int site) {
  unsigned* row = slots[warp_meetings[here / WARP].round & 1];
  row[here] = (unsigned)value;
  meet_warp(site);
  unsigned found = 0;
  for (int lane = 0; lane < WARP; ++lane)
    found |= (unsigned)(row[here / WARP * WARP + lane] == (unsigned)value) << lane;
  return found;
}

static float bf16_of(unsigned half) {
  const unsigned bits = half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float f16_of(unsigned half);
template <class T>
static int byte_of(unsigned byte) {
  return (T)byte;
}

static float plus(float sum, float left, float right) { return sum + left * right; }
static int plus(int sum, int left, int right) {  // wraps, as rows that do not exist may do
  return (int)((unsigned)sum + (unsigned)(left * right));
}

// A warp's product of fragments, each lane with its registers, which hold EACH columns (PTX, mma of
// 16 rows and 8 outputs): row r of a is held by lanes r % 8 * 4 .. + 3, output c of b by lanes
// c * 4 .. + 3; a pair of a's registers, and one of b's, for each of HALVES.
template <class Sum, Sum (*LEFT)(unsigned), Sum (*RIGHT)(unsigned), int EACH, int HALVES>
[[gnu::optimize("O3"), gnu::no_sanitize("bounds")]]
static void multiply_as(Sum* sum, const unsigned* a, const unsigned* b, int site) {
  static const int COLUMNS = 4 * EACH * HALVES;
  static Sum lefts[2][MOST / WARP][16][COLUMNS], rights[2][MOST / WARP][8][COLUMNS];
  const int warp = here / WARP, lane = here % WARP, now = warp_meetings[warp].round & 1;
  auto &left = lefts[now][warp], &right = rights[now][warp];  // others may still read what was
  for (int half = 0; half < HALVES; ++half)
    for (int i = 0; i < EACH; ++i) {
      const int column = (4 * half + lane % 4) * EACH + i, shift = i * (32 / EACH);
      const unsigned mask = ~0u >> (32 - 32 / EACH);
      for (int r = 0; r < 2; ++r)
        left[lane / 4 + 8 * r][column] = LEFT(a[2 * half + r] >> shift & mask);
      right[lane / 4][column] = RIGHT(b[half] >> shift & mask);
    }
  meet_warp(site);
  Sum total[4] = {sum[0], sum[1], sum[2], sum[3]};
  for (int k = 0; k < COLUMNS; ++k)  // four sums at once, each in the order of its columns
    for (int i = 0; i < 4; ++i)
      total[i] = plus(total[i], left[lane / 4 + i / 2 * 8][k], right[lane % 4 * 2 + i % 2][k]);
  memcpy(sum, total, sizeof total);
}

static void multiply(float* sum, const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_as<float, bf16_of, bf16_of, 2, 2>(sum, a, b, -1);
}
static void multiply_f16(float* sum, const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_as<float, f16_of, f16_of, 2, 2>(sum, a, b, -2);
}
// Of bytes, a's signed.
static void multiply_s8(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  multiply_as<int, byte_of<signed char>, byte_of<signed char>, 4, 2>(sum, a, b, -3);
}
static void multiply_u8(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  multiply_as<int, byte_of<signed char>, byte_of<unsigned char>, 4, 2>(sum, a, b, -4);
}
static void multiply_s8_16(int (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
  const unsigned a[2] = {a0, a1};
  multiply_as<int, byte_of<signed char>, byte_of<signed char>, 4, 1>(sum, a, &b, -5);
}
static void multiply_u8_16(int (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
  const unsigned a[2] = {a0, a1};
  multiply_as<int, byte_of<signed char>, byte_of<unsigned char>, 4, 1>(sum, a, &b, -6);
}

template <class... A, size_t... I>
static void unpack(void (*f)(A...), void** args, std::index_sequence<I...>) {
  f(*(A*)args[I]...);
}

static unsigned draw(unsigned& state) {  // xorshift32
  state ^= state << 13;
  state ^= state >> 17;
  return state ^= state << 5;
}

// Order 0: ascending; 1: descending, warp by warp; else shuffled by that seed.
static void arrange(unsigned order, int threads, unsigned& state) {
  for (int i = 0; i < threads; ++i) turns[i] = order == 1 ? threads - 1 - i : i;
  for (int i = threads - 1; order > 1 && i > 0; --i)
    std::swap(turns[i], turns[draw(state) % (unsigned)(i + 1)]);
}

static Index index_of(size_t at) {
  return {(unsigned)(at % grid_size.x), (unsigned)(at / grid_size.x % grid_size.y),
          (unsigned)(at / grid_size.x / grid_size.y)};
}

static void run_grid(unsigned order, unsigned threads) {
  unsigned state = order * 2654435761u | 1u;
  const size_t all = (size_t)grid_size.x * grid_size.y * grid_size.z;
  at_once = order == SIDE_BY_SIDE;
  if (at_once) {  // as many as there is room for
    arrange(0, MOST, state);
    for (size_t i = 0; i < all;) {
      int several = 0;
      while (i < all && (several + 1) * threads <= MOST) blocks[several++].index = index_of(i++);
      run_blocks(several, (int)threads, false);
    }
    return;
  }
  const size_t first = order > 1 && order != FIRST_ALONE ? draw(state) % all : 0;
  for (size_t i = 0; i < all; ++i) {
    if (i && order == FIRST_ALONE) return;
    if (!i || order > 1) arrange(order, (int)threads, state);
    blocks[0].index = index_of(order == 1 ? all - 1 - i : (first + i) % all);
    run_blocks(1, (int)threads, order == 1);
  }
}

// Signals of faults, caught on a stack of their own while a grid runs.
struct Watch {
  static const int COUNT = 3;
  struct sigaction old[COUNT];
  stack_t before;
  static int number(int i) { return i == 0 ? SIGSEGV : i == 1 ? SIGBUS : SIGILL; }
  Watch() {
    static char stack[1 << 16];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &before);
    struct sigaction action = {};
    action.sa_sigaction = caught;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < COUNT; ++i) sigaction(number(i), &action, &old[i]);
  }
  ~Watch() {
    for (int i = 0; i < COUNT; ++i) sigaction(number(i), &old[i], 0);
    sigaltstack(&before, 0);
  }
};

// Runs every block. Returns 0, or what went wrong, after which all fibers begin anew.
template <class... A>
static const char* launch(void (*f)(A...), const unsigned* grid, unsigned threads, void** args,
                          unsigned order) {
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
  Watch watch;
  if (!sigsetjmp(outside, 1)) {
    run_grid(order, threads);
    return 0;
  }
  for (Fiber& fiber : fibers) fiber.started = false;
  return report;
}
}  // namespace shim

#define threadIdx (shim::fibers[shim::here].thread)
#define blockIdx (shim::block->index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
#define __syncthreads() shim::meet(shim::block->meeting, shim::block->alive, __LINE__)
#define SHUFFLE_XOR(value, offset) shim::exchange(value, offset, __LINE__)
#define ALIKE(value) shim::alike(value, __LINE__)
#define __popc __builtin_popcount
#define SYNC_WARP() (void)shim::exchange(0.0f, 1, __LINE__)
using shim::copies_done;
using shim::copy_16;
using shim::multiply;
using shim::multiply_f16;
using shim::multiply_s8;
using shim::multiply_s8_16;
using shim::multiply_u8;
using shim::multiply_u8_16;
#define HOST_ENTRY(name)                                                                 \
  extern "C" const char* host_##name(const unsigned* grid, unsigned threads, void** args, \
                                     unsigned order) {                                    \
    if (threads > MOST_THREADS) return "more threads than the kernel's bounds";              \
    return shim::launch(name, grid, threads, args, order);                               \
  }

// Compiled without contraction, so that each rounds by itself.
#define __dadd_rn(a, b) ((a) + (b))
#define __dmul_rn(a, b) ((a) * (b))
#define __ddiv_rn(a, b) ((a) / (b))
static inline double __longlong_as_double(long long bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
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
static float shim::f16_of(unsigned half) { return half_to_float((unsigned short)half); }
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
