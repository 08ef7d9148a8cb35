// Included before everything else when llama.cpp is built: gcc 12 takes ldtilecfg for a reader of 8
// bytes and drops the stores of the other 56, which ends in a general protection fault.

#if defined(__cplusplus) && defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char (*)[64])(config)))
#endif
