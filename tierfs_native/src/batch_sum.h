/*
 * Checksums of blocks in a tier: XXH3, 64 bits, seed 0, as tierfs/cache/record.py computes them.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

uint64_t tierfs_block_sum(const void *data, size_t length);
