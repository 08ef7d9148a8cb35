// Functions of two elements: arithmetic, and the gated units. `op` is a position in the table BINARY
// of elementwise.py, and the branch on it is the same for every thread.
#pragma once
#include "common.cuh"

DEV float sigmoid_of(float x) {
  const float small = expf(x < 0.0f ? x : -x);
  return x >= 0.0f ? 1.0f / (1.0f + small) : small / (1.0f + small);
}

DEV float gelu_of(float x) {
  // (1 + tanh u) / 2 is the sigmoid of 2 u, which does not cancel.
  return x / (1.0f + expf(-1.59576912160573071f * x * (1.0f + 0.044715f * x * x)));
}

DEV float two_of(int op, float x, float y) {
  switch (op) {
    case 0: return x + y;
    case 1: return x - y;
    case 2: return x * y;
    case 3: return x / y;
    case 4: return x * sigmoid_of(x) * y;
    case 5: return gelu_of(x) * y;
    case 6: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)) * y;
    case 7: return x * sigmoid_of(1.702f * x) * y;
    default: return (x < 0.0f ? 0.0f : x) * y;
  }
}
