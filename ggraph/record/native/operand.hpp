// How many bytes of memory an instruction touches at most.
//
// A fault names the first byte of an access. A vector load that begins below bytes in flight reaches
// into them, and its size stands in the instruction alone. Read is only what tells the size: what
// kind of instruction it is. Where that leaves a doubt the answer is too large, never too small.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

constexpr size_t WIDEST = 64;  // bytes of the largest vector
constexpr size_t STATE = 4096; // and of registers that are saved together

#ifdef __x86_64__
// Of the scalar floating point instructions of map 0F; `last` is the last prefix of F2 and F3.
inline size_t scalar_bytes(uint8_t opcode, uint8_t last) {
    bool scalar = opcode == 0x10 || opcode == 0x11 || opcode == 0x2a || opcode == 0x2c || opcode == 0x2d || opcode == 0xc2;
    scalar |= (opcode >= 0x51 && opcode <= 0x53) || (opcode >= 0x58 && opcode <= 0x5a) || (opcode >= 0x5c && opcode <= 0x5f);
    if (!scalar || !last) return 0;
    return opcode == 0x2a || last == 0xf2 ? 8 : 4; // 2A converts whole numbers of 4 or 8 bytes
}
// Whether an instruction of one byte of opcode has operands of one byte: its lowest bit says so.
inline bool of_one_byte(uint8_t opcode) {
    if (opcode & 1) return false;
    bool arithmetic = opcode < 0x40 && (opcode & 7) < 4, moves = opcode >= 0x80 && opcode <= 0x8a;
    return arithmetic || moves || (opcode >= 0xa0 && opcode <= 0xae) || opcode == 0xc0 || opcode == 0xc6 || opcode == 0xd0
        || opcode == 0xd2 || opcode == 0xf6 || opcode == 0xfe;
}
inline size_t operand_bytes(const void * instruction) {
    auto * p = (const uint8_t *) instruction;
    bool half = false, wide = false;
    uint8_t last = 0;
    for (;; p++) { // prefixes
        if (*p == 0x66) half = true;
        else if (*p == 0xf2 || *p == 0xf3) last = *p;
        else if (*p != 0x67 && *p != 0xf0 && *p != 0x2e && *p != 0x36 && *p != 0x3e && *p != 0x26 && *p != 0x64 && *p != 0x65) break;
    }
    if ((*p & 0xf0) == 0x40) wide = *p++ & 8; // REX
    constexpr uint8_t NAMED[] = { 0, 0, 0xf3, 0xf2 };
    if (*p == 0xc5) { // VEX of two bytes: map 0F
        size_t scalar = scalar_bytes(p[2], NAMED[p[1] & 3]);
        return scalar ? scalar : p[1] & 4 ? 32 : 16;
    }
    if (*p == 0xc4) {
        size_t scalar = (p[1] & 31) == 1 ? scalar_bytes(p[3], NAMED[p[2] & 3]) : 0;
        if ((p[1] & 31) == 2 && (p[3] == 0x49 || p[3] == 0x4b)) return WIDEST; // rows of tiles
        return scalar ? scalar : p[2] & 4 ? 32 : 16;
    }
    if (*p == 0x62) { // EVEX
        size_t scalar = (p[1] & 7) == 1 ? scalar_bytes(p[4], NAMED[p[2] & 3]) : 0;
        return scalar ? scalar : std::min(WIDEST, size_t(16) << (p[3] >> 5 & 3));
    }
    if (*p == 0x0f) {
        uint8_t opcode = p[1];
        if (size_t scalar = scalar_bytes(opcode, last)) return scalar;
        if (opcode == 0xae || opcode == 0xc7) return STATE;
        if ((opcode & 0xf0) == 0x90 || (opcode & 0xf7) == 0xb6) return 1; // SETcc, MOVZX, MOVSX
        bool general = (opcode & 0xf0) == 0x40 || (opcode >= 0xa0 && opcode <= 0xc1);
        return general ? 8 : 16;
    }
    if (*p == 0xd9 || *p == 0xdd) return 128; // x87: its whole state too
    if (*p >= 0xd8 && *p <= 0xdf) return 16;
    if (*p == 0xff || *p == 0x8f) return 8; // calls and pushes
    return of_one_byte(*p) ? 1 : wide ? 8 : half ? 2 : 4;
}
#endif
