#include "batch_index.h"

#include <errno.h>
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT "tierfs tier index 1"
#define TABLES 8
#define READERS 512 /* as the engine has it: whoever is alone makes the reader table */

/* The head of a record; eight bytes of checksum per block and the identity of the object follow. */
struct record {
    uint64_t size_bytes;
    uint64_t present;
    uint64_t zeros;
    uint64_t unverified;
    uint64_t segment;
    uint64_t place_bytes;
    uint32_t epoch;
    uint32_t slack_bytes;
    uint16_t sum_count;
    uint16_t identity_bytes;
    uint32_t reserved;
};
_Static_assert(sizeof(struct record) == 64, "_HEAD of record.py");
_Static_assert(offsetof(struct record, epoch) == 48, "_HEAD of record.py");

struct tierfs_index {
    MDB_env *environment;
    MDB_dbi extents;
    MDB_dbi meta;
};

struct tierfs_index_reader {
    struct tierfs_index *index;
    MDB_txn *txn;
    uint32_t epoch; /* of the tier, in this snapshot */
};

static int errno_of(int code)
{
    if (code == MDB_SUCCESS)
        return 0;
    if (code > 0)
        return -code;
    return code == MDB_NOTFOUND ? -ENOENT : code == MDB_READERS_FULL ? -EAGAIN : -EIO;
}

static int get_meta(MDB_txn *txn, MDB_dbi meta, const char *name, MDB_val *value)
{
    char copy[16];
    MDB_val key = {.mv_size = strlen(name), .mv_data = copy};

    memcpy(copy, name, key.mv_size);
    return errno_of(mdb_get(txn, meta, &key, value));
}

static bool is_text(const MDB_val *value, const char *text)
{
    return value->mv_size == strlen(text) && memcmp(value->mv_data, text, value->mv_size) == 0;
}

static int check_format(MDB_txn *txn, MDB_dbi meta, const char *boot_id)
{
    MDB_val value;

    if (get_meta(txn, meta, "format", &value) < 0 || !is_text(&value, FORMAT))
        return -EPROTO;
    /* Opening raises the epoch after an unclean reboot; until then no record can be believed. */
    if (get_meta(txn, meta, "boot", &value) < 0 || !is_text(&value, boot_id))
        return -EPROTO;
    return 0;
}

static int open_tables(struct tierfs_index *index, const char *boot_id)
{
    MDB_txn *txn;
    int result = errno_of(mdb_txn_begin(index->environment, NULL, MDB_RDONLY, &txn));

    if (result < 0)
        return result;
    result = errno_of(mdb_dbi_open(txn, "meta", 0, &index->meta));
    if (result == 0)
        result = errno_of(mdb_dbi_open(txn, "extent", 0, &index->extents));
    if (result == 0)
        result = check_format(txn, index->meta, boot_id);
    if (result < 0) {
        mdb_txn_abort(txn);
        return result;
    }
    /* Handles of tables outlive the transaction only if it is committed. */
    return errno_of(mdb_txn_commit(txn));
}

int tierfs_index_open(const char *path, const char *boot_id, struct tierfs_index **index)
{
    struct tierfs_index *made = calloc(1, sizeof(*made));
    int result, dead;

    if (made == NULL)
        return -ENOMEM;
    result = errno_of(mdb_env_create(&made->environment));
    if (result < 0) {
        free(made);
        return result;
    }
    result = errno_of(mdb_env_set_maxdbs(made->environment, TABLES));
    if (result == 0)
        result = errno_of(mdb_env_set_maxreaders(made->environment, READERS));
    if (result == 0)
        result =
            errno_of(mdb_env_open(made->environment, path, MDB_RDONLY | MDB_NOTLS | MDB_NORDAHEAD, 0600));
    if (result == 0)
        result = open_tables(made, boot_id);
    if (result < 0) {
        tierfs_index_close(made);
        return result;
    }
    /* Whoever was killed while it had a snapshot would keep the index growing. */
    (void)mdb_reader_check(made->environment, &dead);
    *index = made;
    return 0;
}

void tierfs_index_close(struct tierfs_index *index)
{
    if (index == NULL)
        return;
    mdb_env_close(index->environment);
    free(index);
}

int tierfs_index_reader_open(struct tierfs_index *index, struct tierfs_index_reader **reader)
{
    struct tierfs_index_reader *made = calloc(1, sizeof(*made));
    int result;

    if (made == NULL)
        return -ENOMEM;
    made->index = index;
    result = errno_of(mdb_txn_begin(index->environment, NULL, MDB_RDONLY, &made->txn));
    if (result < 0) {
        free(made);
        return result;
    }
    mdb_txn_reset(made->txn);
    *reader = made;
    return 0;
}

void tierfs_index_reader_close(struct tierfs_index_reader *reader)
{
    if (reader == NULL)
        return;
    mdb_txn_abort(reader->txn);
    free(reader);
}

int tierfs_index_begin(struct tierfs_index_reader *reader, uint64_t *snapshot)
{
    MDB_val value;
    int result = errno_of(mdb_txn_renew(reader->txn));

    if (result < 0)
        return result;
    reader->epoch = 0;
    result = get_meta(reader->txn, reader->index->meta, "epoch", &value);
    if (result == 0 && value.mv_size >= sizeof(reader->epoch))
        memcpy(&reader->epoch, value.mv_data, sizeof(reader->epoch));
    else if (result != -ENOENT) {
        mdb_txn_reset(reader->txn);
        return result < 0 ? result : -EUCLEAN;
    }
    *snapshot = mdb_txn_id(reader->txn);
    return 0;
}

void tierfs_index_end(struct tierfs_index_reader *reader)
{
    mdb_txn_reset(reader->txn);
}

int tierfs_index_find(struct tierfs_index_reader *reader, const uint8_t content_id[16], uint32_t extent_no,
                      struct tierfs_extent *extent)
{
    uint8_t name[20];
    const uint32_t number = __builtin_bswap32(extent_no);
    MDB_val key = {.mv_size = sizeof(name), .mv_data = name};
    MDB_val value;
    int result;

    memcpy(name, content_id, 16);
    memcpy(name + 16, &number, sizeof(number));
    result = errno_of(mdb_get(reader->txn, reader->index->extents, &key, &value));
    if (result < 0)
        return result;
    return tierfs_extent_decode(value.mv_data, value.mv_size, extent_no, reader->epoch, extent);
}

uint32_t tierfs_blocks_in_extent(uint64_t size_bytes, uint64_t extent_no)
{
    const uint64_t blocks = size_bytes / TIERFS_BLOCK_BYTES + (size_bytes % TIERFS_BLOCK_BYTES != 0);
    const uint64_t before = extent_no * TIERFS_EXTENT_BLOCKS;

    if (blocks <= before)
        return 0;
    return (uint32_t)(blocks - before < TIERFS_EXTENT_BLOCKS ? blocks - before : TIERFS_EXTENT_BLOCKS);
}

uint64_t tierfs_block_mask(uint32_t blocks)
{
    return blocks >= 64 ? UINT64_MAX : (UINT64_C(1) << blocks) - 1;
}

int tierfs_extent_decode(const void *data, size_t length, uint32_t extent_no, uint32_t epoch,
                         struct tierfs_extent *extent)
{
    struct record head;
    uint64_t full;

    if (length < sizeof(head))
        return -EUCLEAN;
    memcpy(&head, data, sizeof(head));
    extent->sum_count = tierfs_blocks_in_extent(head.size_bytes, extent_no);
    full = tierfs_block_mask(extent->sum_count);
    if (head.size_bytes > INT64_MAX || head.sum_count != extent->sum_count ||
        length != sizeof(head) + head.sum_count * sizeof(uint64_t) + head.identity_bytes ||
        (head.present & ~full) != 0 || (head.zeros & ~head.present) != 0 ||
        (head.unverified & ~head.present) != 0)
        return -EUCLEAN;
    /* Contents in segments are small and all there; the offset must not run over. */
    if (head.segment != 0 && (extent_no != 0 || head.size_bytes > TIERFS_EXTENT_BYTES ||
                              head.place_bytes > INT64_MAX - TIERFS_EXTENT_BYTES))
        return -EUCLEAN;
    extent->size_bytes = head.size_bytes;
    extent->present = head.present;
    extent->unverified = head.epoch == epoch ? head.unverified : head.present;
    extent->segment = head.segment;
    extent->place_bytes = head.segment != 0 ? head.place_bytes : 0;
    memcpy(extent->sums, (const uint8_t *)data + sizeof(head), head.sum_count * sizeof(uint64_t));
    return 0;
}

void tierfs_tier_path(char path[TIERFS_TIER_PATH], uint64_t segment, const uint8_t content_id[16])
{
    static const char digits[] = "0123456789abcdef";
    char hex[33];

    if (segment != 0) {
        snprintf(path, TIERFS_TIER_PATH, "segments/%016llx", (unsigned long long)segment);
        return;
    }
    for (size_t i = 0; i < 16; i++) {
        hex[2 * i] = digits[content_id[i] >> 4];
        hex[2 * i + 1] = digits[content_id[i] & 15];
    }
    hex[32] = '\0';
    snprintf(path, TIERFS_TIER_PATH, "objects/%.2s/%s", hex, hex);
}
