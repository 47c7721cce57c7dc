/* Makes tiers for tests and fuzzers: the directory, an index whose records may be anything, files of known bytes. */
#pragma once

#include "namespace.h"

#include "batch_index.h"

#include <fcntl.h>
#include <ftw.h>
#include <string.h>
#include <sys/stat.h>

#define TIER_FORMAT "tierfs tier index 1"

struct tier_place {
    char root[PATH_BYTES];
    char index[PATH_BYTES + 16];
    char boot[37];
};

/* The one who writes the index: closed before a reader opens it, or in another process. */
struct tier_writer {
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi extents;
};

/* Every file has bytes of its own, and every offset others. */
static inline char tier_byte_at(uint64_t file, uint64_t offset)
{
    return (char)(file * 31 + offset * 7 + offset / 4096);
}

static inline void tier_put(MDB_txn *txn, MDB_dbi table, const void *key, size_t key_bytes, const void *value,
                            size_t value_bytes)
{
    MDB_val k = {key_bytes, (void *)(uintptr_t)key};
    MDB_val v = {value_bytes, (void *)(uintptr_t)value};

    assert(mdb_put(txn, table, &k, &v, 0) == 0);
}

static inline void tier_writer_open(struct tier_writer *writer, const struct tier_place *place)
{
    MDB_dbi meta;

    assert(mdb_env_create(&writer->env) == 0 && mdb_env_set_maxdbs(writer->env, 8) == 0);
    assert(mdb_env_set_mapsize(writer->env, 256 << 20) == 0 && mdb_env_set_maxreaders(writer->env, 512) == 0);
    assert(mdb_env_open(writer->env, place->index, MDB_NOSYNC, 0600) == 0);
    assert(mdb_txn_begin(writer->env, NULL, 0, &writer->txn) == 0);
    assert(mdb_dbi_open(writer->txn, "meta", MDB_CREATE, &meta) == 0);
    assert(mdb_dbi_open(writer->txn, "extent", MDB_CREATE, &writer->extents) == 0);
    tier_put(writer->txn, meta, "format", 6, TIER_FORMAT, strlen(TIER_FORMAT));
    tier_put(writer->txn, meta, "boot", 4, place->boot, strlen(place->boot));
}

static inline void tier_writer_commit(struct tier_writer *writer)
{
    assert(mdb_txn_commit(writer->txn) == 0);
    assert(mdb_txn_begin(writer->env, NULL, 0, &writer->txn) == 0);
}

static inline void tier_writer_close(struct tier_writer *writer)
{
    assert(mdb_txn_commit(writer->txn) == 0);
    mdb_env_close(writer->env);
}

/* A tier of this boot, with an empty index. */
static inline void tier_make(struct tier_place *place)
{
    struct tier_writer writer;
    char path[PATH_BYTES + 32];
    FILE *boot = fopen("/proc/sys/kernel/random/boot_id", "re");

    assert(boot != NULL && fread(place->boot, 1, 36, boot) == 36);
    place->boot[36] = '\0';
    fclose(boot);
    make_directory(place->root);
    for (size_t i = 0; i < 3; i++) {
        static const char *const names[] = {"index.lmdb", "segments", "objects"};

        snprintf(path, sizeof(path), "%s/%s", place->root, names[i]);
        assert(mkdir(path, 0700) == 0);
    }
    snprintf(place->index, sizeof(place->index), "%s/index.lmdb", place->root);
    tier_writer_open(&writer, place);
    tier_writer_close(&writer);
}

/* A segment, or (0) the own file of the content whose id is that number; bytes as tier_byte_at(number) has them. */
static inline void tier_write_file(const struct tier_place *place, uint64_t segment, uint64_t number,
                                   uint64_t size_bytes)
{
    char inside[TIERFS_TIER_PATH], path[2 * PATH_BYTES];
    uint8_t content_id[16] = {0};
    FILE *file;

    memcpy(content_id, &number, sizeof(number));
    tierfs_tier_path(inside, segment, content_id);
    snprintf(path, sizeof(path), "%s/%s", place->root, inside);
    *strrchr(path, '/') = '\0';
    assert(mkdir(path, 0700) == 0 || access(path, F_OK) == 0);
    path[strlen(path)] = '/';
    file = fopen(path, "we");
    assert(file != NULL);
    for (uint64_t at = 0; at < size_bytes; at++)
        putc(tier_byte_at(segment != 0 ? segment : number, at), file);
    assert(fclose(file) == 0);
}

/* -- records for fuzzers ------------------------------------------------------------------------------------------- */

#define TIER_HEAD_BYTES 64u
#define TIER_RECORD_MAX (TIER_HEAD_BYTES + 8 * TIERFS_EXTENT_BLOCKS)

struct tier_random {
    uint64_t state;
};

static inline uint32_t tier_random(struct tier_random *random, uint32_t below)
{
    random->state = random->state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random->state >> 33) % below;
}

/* A sound record without an identity; some of its blocks are there, and it may lie in a segment. Returns its size. */
static inline size_t tier_random_record(uint8_t record[TIER_RECORD_MAX], struct tier_random *random,
                                        uint32_t extent_no, uint64_t size_bytes)
{
    const uint16_t sums = (uint16_t)tierfs_blocks_in_extent(size_bytes, extent_no);
    const uint64_t full = tierfs_block_mask(sums);
    const uint64_t present = tier_random(random, 3) != 0 ? full : full & tier_random(random, 1u << 20);
    const uint64_t unverified = tier_random(random, 4) != 0 ? 0 : present & tier_random(random, 1u << 20);
    const uint64_t segment =
        extent_no == 0 && size_bytes <= TIERFS_EXTENT_BYTES ? tier_random(random, 2) * 5 : 0;
    const uint64_t place = segment != 0 ? tier_random(random, 3u << 20) : 0;

    memset(record, 0, TIER_HEAD_BYTES + 8u * sums);
    memcpy(record, &size_bytes, 8);
    memcpy(record + 8, &present, 8);
    memcpy(record + 24, &unverified, 8);
    memcpy(record + 32, &segment, 8);
    memcpy(record + 40, &place, 8);
    memcpy(record + 56, &sums, 2);
    return TIER_HEAD_BYTES + 8u * sums;
}

/* -- cleaning up --------------------------------------------------------------------------------------------------- */

static char tier_to_remove[PATH_BYTES];

static inline int tier_remove_one(const char *path, const struct stat *info, int type, struct FTW *walk)
{
    (void)info, (void)type, (void)walk;
    return remove(path);
}

static inline void tier_remove(void)
{
    (void)nftw(tier_to_remove, tier_remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Files are opened by name as long as this process lives. One tier in a process; a child has to end with _exit. */
static inline void tier_remove_at_exit(const struct tier_place *place)
{
    memcpy(tier_to_remove, place->root, sizeof(tier_to_remove));
    assert(atexit(tier_remove) == 0);
}
