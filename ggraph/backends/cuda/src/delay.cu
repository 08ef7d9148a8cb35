// A kernel that only takes time: the stream that must lose a race runs it first.
#include "common.cuh"
#include "delay.cuh"

KERNEL delay(i64 duration) { pass(duration); }
