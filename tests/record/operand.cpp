// How many bytes each instruction touches: operand HEX.. prints a number for each.
#include "operand.hpp"

#include <cstdio>
#include <cstring>

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; i++) {
        unsigned char code[16] = {};
        for (size_t k = 0; k < strlen(argv[i]) / 2; k++) sscanf(argv[i] + 2 * k, "%2hhx", code + k);
        printf("%zu\n", operand_bytes(code));
    }
}
