// A kernel that only takes time: the stream that must lose a race runs it first.
#include "common.cuh"

#ifdef GGRAPH_HOST
DEV i64 nanoseconds() {
  static i64 clock = 0;
  return clock += 1000000;
}
#else
DEV i64 nanoseconds() {
  i64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
#endif

KERNEL delay(i64 duration) {
  const i64 begun = nanoseconds();
  while (nanoseconds() - begun < duration) {
  }
}
