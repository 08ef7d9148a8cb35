// Time that passes on the device. Comes after common.cuh.
#pragma once

#ifdef GGRAPH_HOST
DEV void pass(i64 nanoseconds) {  // a turn of the threads is a microsecond
  for (; nanoseconds > 0; nanoseconds -= 1000) shim::nap();
}
#else
DEV i64 now() {
  i64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

DEV void pass(i64 nanoseconds) {
  const i64 begun = now();
  while (now() - begun < nanoseconds) {
  }
}
#endif

// Of a launch that is to run in parts: all blocks but the first begin when that is done.
DEV void pass_unless_first() {
  if (blockIdx.x | blockIdx.y | blockIdx.z) pass(1000000);
}
