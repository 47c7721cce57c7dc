/* Batch reads: from a namespace and a tier made by hand to bytes in memory, and what must not be believed. */
#include "namespace.h"

#include "batch.h"
#include "batch_ring.h"
#include "batch_sum.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/stat.h>

#define BOOT "11111111-2222-3333-4444-555555555555"
#define FOREVER INT64_MAX
#define SEGMENT UINT64_C(0x0123456789abcdef)
#define OWNER 4711
#define RECORD_MAX (64 + 8 * TIERFS_EXTENT_BLOCKS + 16)

/* What is on disk: one namespace and one tier. */
struct place {
    char names[PATH_BYTES];
    char tier[PATH_BYTES];
    char index[PATH_BYTES + 16];
};

/* A file of the tests: its content id is its inode number, its bytes follow from both. */
struct file {
    uint64_t ino;
    uint64_t size_bytes;
    uint64_t segment, place_bytes;
};

static void content_id_of(uint8_t id[16], uint64_t ino)
{
    memset(id, 0, 16);
    memcpy(id, &ino, sizeof(ino));
}

static char byte_at(uint64_t ino, uint64_t offset)
{
    return (char)(ino * 31 + offset * 7 + offset / 4096);
}

static size_t make_record(uint8_t record[RECORD_MAX], const struct file *file, uint64_t present,
                          uint32_t epoch)
{
    const uint32_t blocks = tierfs_blocks_in_extent(file->size_bytes, 0);
    const uint16_t counts[2] = {(uint16_t)blocks, 4};
    uint8_t *block = malloc(TIERFS_BLOCK_BYTES);

    assert(block != NULL);
    memset(record, 0, RECORD_MAX);
    memcpy(record, &file->size_bytes, 8);
    memcpy(record + 8, &present, 8);
    memcpy(record + 32, &file->segment, 8);
    memcpy(record + 40, &file->place_bytes, 8);
    memcpy(record + 48, &epoch, 4);
    memcpy(record + 56, counts, 4);
    for (uint32_t i = 0; i < blocks; i++) {
        const uint64_t start = i * TIERFS_BLOCK_BYTES;
        const uint64_t left = file->size_bytes - start;
        const uint64_t length = left < TIERFS_BLOCK_BYTES ? left : TIERFS_BLOCK_BYTES;
        uint64_t sum;

        for (uint64_t at = 0; at < length; at++)
            block[at] = (uint8_t)byte_at(file->ino, start + at);
        sum = tierfs_block_sum(block, length);
        memcpy(record + 64 + 8 * i, &sum, 8);
    }
    free(block);
    return 64 + 8 * blocks + 4;
}

/* -- writing, always in a child: this process has the databases open for reading ------------------------------------ */

typedef void change_fn(const struct place *place);

static void in_child(const struct place *place, change_fn *change)
{
    int status;
    const pid_t child = fork();

    assert(child >= 0);
    if (child == 0) {
        change(place);
        _exit(0);
    }
    assert(waitpid(child, &status, 0) == child && status == 0);
}

static void index_write(const struct place *place, const char *table, const void *key, size_t key_bytes,
                        const void *value, size_t value_bytes)
{
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    MDB_val k = {key_bytes, (void *)(uintptr_t)key};
    MDB_val v = {value_bytes, (void *)(uintptr_t)value};

    assert(mdb_env_create(&env) == 0 && mdb_env_set_maxdbs(env, 8) == 0 &&
           mdb_env_set_mapsize(env, 64 << 20) == 0);
    assert(mdb_env_set_maxreaders(env, 512) == 0 && mdb_env_open(env, place->index, MDB_NOSYNC, 0600) == 0);
    assert(mdb_txn_begin(env, NULL, 0, &txn) == 0 && mdb_dbi_open(txn, table, MDB_CREATE, &dbi) == 0);
    if (value != NULL)
        assert(mdb_put(txn, dbi, &k, &v, 0) == 0);
    else
        assert(mdb_del(txn, dbi, &k, NULL) == 0);
    assert(mdb_txn_commit(txn) == 0);
    mdb_env_close(env);
}

static void put_extent(const struct place *place, const struct file *file, uint64_t present, uint32_t epoch)
{
    uint8_t key[20] = {0}, record[RECORD_MAX];
    const size_t length = make_record(record, file, present, epoch);

    content_id_of(key, file->ino);
    index_write(place, "extent", key, sizeof(key), record, length);
}

static void remove_extent(const struct place *place, uint64_t ino)
{
    uint8_t key[20] = {0};

    content_id_of(key, ino);
    index_write(place, "extent", key, sizeof(key), NULL, 0);
}

static void path_in_tier(const struct place *place, const struct file *file, char path[2 * PATH_BYTES])
{
    uint8_t id[16];
    char hex[33];

    if (file->segment != 0) {
        snprintf(path, 2 * PATH_BYTES, "%s/segments/%016llx", place->tier, (unsigned long long)file->segment);
        return;
    }
    content_id_of(id, file->ino);
    for (size_t i = 0; i < 16; i++)
        snprintf(hex + 2 * i, 3, "%02x", id[i]);
    snprintf(path, 2 * PATH_BYTES, "%s/objects/%.2s", place->tier, hex);
    (void)mkdir(path, 0700);
    snprintf(path, 2 * PATH_BYTES, "%s/objects/%.2s/%s", place->tier, hex, hex);
}

static void write_bytes(const struct place *place, const struct file *file)
{
    char path[2 * PATH_BYTES];
    char *data = malloc(file->size_bytes);
    int fd;

    assert(data != NULL);
    for (uint64_t at = 0; at < file->size_bytes; at++)
        data[at] = byte_at(file->ino, at);
    path_in_tier(place, file, path);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert(fd >= 0 &&
           pwrite(fd, data, file->size_bytes, (off_t)file->place_bytes) == (ssize_t)file->size_bytes);
    close(fd);
    free(data);
}

/* -- what the tests work on ------------------------------------------------------------------------------------- */

enum {
    ROOT = 1,
    DIRECTORY,
    PACKED,
    OWN_FILE,
    EMPTY,
    WRITTEN,
    EXPIRED,
    LINK,
    PRIVATE,
    HIDDEN_DIRECTORY,
    HIDDEN,
    PARTLY,
    OLD_EPOCH,
    DEFAULT_MODE,
    OTHER_SIZE,
    INODES
};

static const struct file packed = {PACKED, 50000, SEGMENT, 8192};
static const struct file own_file = {OWN_FILE, 3 * TIERFS_BLOCK_BYTES + 100, 0, 0};
static const struct file partly = {PARTLY, 2 * TIERFS_BLOCK_BYTES, 0, 0};
static const struct file old_epoch = {OLD_EPOCH, 1000, SEGMENT, 65536};
static const struct file private_file = {PRIVATE, 10, SEGMENT, 70000};
static const struct file hidden = {HIDDEN, 10, SEGMENT, 70010};
static const struct file default_mode = {DEFAULT_MODE, 20, SEGMENT, 70020};
static const struct file other_size = {OTHER_SIZE, 77, SEGMENT, 70040};

static void put_file(struct writer *writer, uint64_t parent, const char *name, struct tierfs_inode inode)
{
    content_id_of(inode.content_id, inode.ino);
    inode.nlink = 1;
    if (inode.valid_until_ns == 0)
        inode.valid_until_ns = FOREVER;
    if (inode.uid == 0)
        inode.uid = inode.gid = OWNER;
    if (inode.ino != DEFAULT_MODE && inode.ino != ROOT)
        inode.flags |= TIERFS_META_KNOWN;
    put_inode(writer, &inode);
    if (inode.ino != ROOT)
        put_name_of(writer, parent, name, inode.ino, inode.mode & S_IFMT, 100 + inode.ino);
}

static void write_names(const struct place *place)
{
    struct writer w;

    writer_open(&w, place->names);
    put_format(&w, TIERFS_FORMAT_VERSION);
    put_file(&w, 0, "", (struct tierfs_inode){.ino = ROOT, .mode = S_IFDIR | 0755});
    put_file(&w, ROOT, "d", (struct tierfs_inode){.ino = DIRECTORY, .mode = S_IFDIR | 0755});
    put_file(&w, DIRECTORY, "packed",
             (struct tierfs_inode){.ino = PACKED, .mode = S_IFREG | 0644, .size_bytes = packed.size_bytes});
    put_file(
        &w, DIRECTORY, "own",
        (struct tierfs_inode){.ino = OWN_FILE, .mode = S_IFREG | 0644, .size_bytes = own_file.size_bytes});
    put_file(&w, ROOT, "empty", (struct tierfs_inode){.ino = EMPTY, .mode = S_IFREG | 0644});
    put_file(&w, ROOT, "written",
             (struct tierfs_inode){
                 .ino = WRITTEN, .mode = S_IFREG | 0644, .size_bytes = 10, .flags = TIERFS_DATA_LOCAL});
    put_file(&w, ROOT, "expired",
             (struct tierfs_inode){.ino = EXPIRED, .mode = S_IFREG | 0644, .valid_until_ns = 1});
    put_file(&w, ROOT, "link", (struct tierfs_inode){.ino = LINK, .mode = S_IFLNK | 0777});
    put_file(
        &w, ROOT, "private",
        (struct tierfs_inode){.ino = PRIVATE, .mode = S_IFREG | 0640, .uid = 1, .gid = 2, .size_bytes = 10});
    put_file(&w, ROOT, "hidden", (struct tierfs_inode){.ino = HIDDEN_DIRECTORY, .mode = S_IFDIR | 0600});
    put_file(&w, HIDDEN_DIRECTORY, "f",
             (struct tierfs_inode){.ino = HIDDEN, .mode = S_IFREG | 0644, .size_bytes = 10});
    put_file(&w, ROOT, "partly",
             (struct tierfs_inode){.ino = PARTLY, .mode = S_IFREG | 0644, .size_bytes = partly.size_bytes});
    put_file(
        &w, ROOT, "old",
        (struct tierfs_inode){.ino = OLD_EPOCH, .mode = S_IFREG | 0644, .size_bytes = old_epoch.size_bytes});
    /* The mode of a listing counts for nothing; what the root's record says does. */
    put_file(&w, ROOT, "default",
             (struct tierfs_inode){.ino = DEFAULT_MODE, .mode = S_IFREG, .uid = 99, .size_bytes = 20});
    put_file(&w, ROOT, "size",
             (struct tierfs_inode){.ino = OTHER_SIZE, .mode = S_IFREG | 0644, .size_bytes = 78});
    writer_close(&w);
}

static void write_tier(const struct place *place)
{
    const struct file *const files[] = {&packed,    &own_file, &partly,       &private_file,
                                        &old_epoch, &hidden,   &default_mode, &other_size};
    const uint32_t epoch = 3;
    char path[PATH_BYTES + 16];

    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%s", place->tier,
                 (const char *[]){"objects", "segments", "index.lmdb"}[i]);
        assert(mkdir(path, 0700) == 0);
    }
    index_write(place, "meta", "format", 6, "tierfs tier index 1", 19);
    index_write(place, "meta", "boot", 4, BOOT, strlen(BOOT));
    index_write(place, "meta", "epoch", 5, &epoch, sizeof(epoch));
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        write_bytes(place, files[i]);
        put_extent(
            place, files[i],
            files[i] == &partly ? 1 : (UINT64_C(1) << tierfs_blocks_in_extent(files[i]->size_bytes, 0)) - 1,
            files[i] == &old_epoch ? 2 : 3);
    }
}

static void make_place(struct place *place)
{
    make_directory(place->names);
    make_directory(place->tier);
    snprintf(place->index, sizeof(place->index), "%s/index.lmdb", place->tier);
    in_child(place, write_names);
    in_child(place, write_tier);
}

static void remove_place(const struct place *place)
{
    char command[2 * PATH_BYTES];

    remove_directory(place->names);
    snprintf(command, sizeof(command), "rm -rf '%s'", place->tier);
    assert(system(command) == 0);
}

struct opened {
    struct tierfs_batch batch;
    struct tierfs_lane *lane;
    struct tierfs_caller caller;
};

static void open_place(const struct place *place, struct opened *opened)
{
    memset(opened, 0, sizeof(*opened));
    assert(tierfs_view_open(place->names, &opened->batch.view) == 0);
    opened->batch.owner = OWNER;
    opened->batch.tier_count = 1;
    opened->batch.tiers[0].directory = open(place->tier, O_PATH | O_DIRECTORY | O_CLOEXEC);
    assert(opened->batch.tiers[0].directory >= 0);
    assert(tierfs_index_open(place->index, BOOT, &opened->batch.tiers[0].index) == 0);
    assert(tierfs_lane_open(&opened->batch, &opened->lane) == 0);
    opened->caller = (struct tierfs_caller){.uid = OWNER, .gid = OWNER};
}

static void close_place(struct opened *opened)
{
    tierfs_lane_close(opened->lane);
    tierfs_index_close(opened->batch.tiers[0].index);
    tierfs_view_close(opened->batch.view);
    close(opened->batch.tiers[0].directory);
}

static struct tierfs_wanted wanted(const char *path)
{
    return (struct tierfs_wanted){.path = path, .path_bytes = strlen(path)};
}

static enum tierfs_outcome plan_one(struct opened *opened, const char *path, uint64_t expected_ino)
{
    struct tierfs_wanted file = wanted(path);

    file.expected_ino = expected_ino;
    assert(tierfs_batch_plan(opened->lane, &opened->caller, &file, 1, false) == 0);
    return file.outcome;
}

/* Plans, lets the world change, reads. The bytes are compared if the outcome is that they are there. */
static enum tierfs_outcome read_one(const struct place *place, struct opened *opened, const char *path,
                                    change_fn *change)
{
    struct tierfs_wanted file = wanted(path);
    char *memory;

    assert(tierfs_batch_plan(opened->lane, &opened->caller, &file, 1, false) == 0);
    if (file.outcome != TIERFS_LOCAL)
        return file.outcome;
    memory = malloc(file.size_bytes + 1);
    assert(memory != NULL);
    memset(memory, 0x55, file.size_bytes + 1);
    file.destination = memory;
    if (change != NULL)
        in_child(place, change);
    tierfs_batch_read(opened->lane, &file, 1);
    if (file.outcome == TIERFS_LOCAL)
        for (uint64_t at = 0; at < file.size_bytes; at++)
            assert(memory[at] == byte_at(file.ino, at));
    assert(memory[file.size_bytes] == 0x55);
    free(memory);
    return file.outcome;
}

/* -- tests -------------------------------------------------------------------------------------------------------- */

static void test_outcomes(struct opened *opened)
{
    const struct {
        const char *path;
        enum tierfs_outcome outcome;
    } cases[] = {
        {"d/packed", TIERFS_LOCAL},        {"d/own", TIERFS_LOCAL},
        {"empty", TIERFS_LOCAL},           {"default", TIERFS_LOCAL},
        {"written", TIERFS_BEING_WRITTEN}, {"expired", TIERFS_UNKNOWN_NAME},
        {"missing", TIERFS_UNKNOWN_NAME},  {"d/missing/f", TIERFS_UNKNOWN_NAME},
        {"d", TIERFS_NOT_A_FILE},          {"link", TIERFS_NOT_A_FILE},
        {"link/f", TIERFS_NOT_A_FILE},     {"d/own/f", TIERFS_NOT_A_FILE},
        {"private", TIERFS_NO_ACCESS},     {"hidden/f", TIERFS_NO_ACCESS},
        {"partly", TIERFS_ABSENT},         {"size", TIERFS_ABSENT},
        {"old", TIERFS_UNVERIFIED},        {"", TIERFS_ELSEWHERE},
        {"/", TIERFS_ELSEWHERE},           {"d/", TIERFS_ELSEWHERE},
        {"d//own", TIERFS_ELSEWHERE},      {"d/../empty", TIERFS_ELSEWHERE},
        {"./empty", TIERFS_ELSEWHERE},     {"..", TIERFS_ELSEWHERE},
    };
    char long_name[TIERFS_NAME_MAX + 2];
    struct tierfs_wanted with_nul = {.path = "d\0own", .path_bytes = 5};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert(plan_one(opened, cases[i].path, 0) == cases[i].outcome);
    memset(long_name, 'a', sizeof(long_name));
    long_name[TIERFS_NAME_MAX + 1] = '\0';
    assert(plan_one(opened, long_name, 0) == TIERFS_ELSEWHERE);
    long_name[TIERFS_NAME_MAX] = '\0';
    assert(plan_one(opened, long_name, 0) == TIERFS_UNKNOWN_NAME);
    assert(tierfs_batch_plan(opened->lane, &opened->caller, &with_nul, 1, false) == 0);
    assert(with_nul.outcome == TIERFS_ELSEWHERE);
    assert(plan_one(opened, "d/own", OWN_FILE) == TIERFS_LOCAL);
    assert(plan_one(opened, "d/own", PACKED) == TIERFS_REPLACED);
}

static void test_access(struct opened *opened)
{
    const struct tierfs_caller owner = opened->caller;

    opened->caller.groups[opened->caller.group_count++] = 2;
    assert(plan_one(opened, "private", 0) == TIERFS_LOCAL);
    opened->caller.too_many_groups = true;
    assert(plan_one(opened, "private", 0) == TIERFS_NO_ACCESS);
    opened->caller = owner;
    opened->caller.overrides = true;
    assert(plan_one(opened, "private", 0) == TIERFS_LOCAL);
    assert(plan_one(opened, "hidden/f", 0) == TIERFS_LOCAL);
    /* Not even then: another user's process has no business in these tiers. */
    opened->caller.uid = OWNER + 1;
    assert(plan_one(opened, "d/packed", 0) == TIERFS_NO_ACCESS);
    opened->caller = owner;
}

static void test_many_at_once(struct opened *opened)
{
    enum {
        COUNT = 1000
    };
    static const char *const paths[] = {"d/packed", "d/own", "missing", "empty", "old"};
    struct tierfs_wanted *files = calloc(COUNT, sizeof(*files));
    const size_t room = own_file.size_bytes;
    char *memory = malloc(COUNT * room);

    assert(files != NULL && memory != NULL);
    for (size_t i = 0; i < COUNT; i++) {
        files[i] = wanted(paths[i % 5]);
        files[i].destination = memory + i * room;
    }
    assert(tierfs_batch_plan(opened->lane, &opened->caller, files, COUNT, false) == 0);
    tierfs_batch_read(opened->lane, files, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        assert(files[i].outcome == (i % 5 == 2   ? TIERFS_UNKNOWN_NAME
                                    : i % 5 == 4 ? TIERFS_UNVERIFIED
                                                 : TIERFS_LOCAL));
        for (uint64_t at = 0; files[i].outcome == TIERFS_LOCAL && at < files[i].size_bytes; at += 97)
            assert(memory[i * room + at] == byte_at(files[i].ino, at));
    }
    free(memory);
    free(files);
}

static void begin_to_write(const struct place *place)
{
    struct writer w;
    struct tierfs_inode inode = {.ino = PACKED,
                                 .mode = S_IFREG | 0644,
                                 .flags = TIERFS_META_KNOWN | TIERFS_DATA_LOCAL,
                                 .uid = OWNER,
                                 .size_bytes = packed.size_bytes,
                                 .valid_until_ns = FOREVER};

    content_id_of(inode.content_id, PACKED);
    writer_open(&w, place->names);
    put_inode(&w, &inode);
    writer_close(&w);
}

static void end_of_writing(const struct place *place)
{
    struct writer w;
    struct tierfs_inode inode = {.ino = PACKED,
                                 .mode = S_IFREG | 0644,
                                 .flags = TIERFS_META_KNOWN,
                                 .uid = OWNER,
                                 .size_bytes = packed.size_bytes,
                                 .valid_until_ns = FOREVER};

    content_id_of(inode.content_id, PACKED);
    writer_open(&w, place->names);
    put_inode(&w, &inode);
    writer_close(&w);
}

static void evict_packed(const struct place *place)
{
    remove_extent(place, PACKED);
}

static void move_packed(const struct place *place)
{
    struct file moved = packed;

    moved.place_bytes += 1 << 20;
    write_bytes(place, &moved);
    put_extent(place, &moved, 1, 3);
}

static void return_packed(const struct place *place)
{
    put_extent(place, &packed, 1, 3);
}

static void evict_and_return_packed(const struct place *place)
{
    remove_extent(place, PACKED);
    put_extent(place, &packed, 1, 3);
}

static void replace_own_file(const struct place *place)
{
    char path[2 * PATH_BYTES], aside[2 * PATH_BYTES + 8];

    path_in_tier(place, &own_file, path);
    snprintf(aside, sizeof(aside), "%s.aside", path);
    assert(rename(path, aside) == 0);
    assert(unlink(aside) == 0);
}

static void return_own_file(const struct place *place)
{
    write_bytes(place, &own_file);
}

static void test_what_changes_in_between(const struct place *place, struct opened *opened)
{
    assert(read_one(place, opened, "d/packed", NULL) == TIERFS_LOCAL);
    assert(read_one(place, opened, "d/own", NULL) == TIERFS_LOCAL);

    assert(read_one(place, opened, "d/packed", begin_to_write) == TIERFS_CHANGED);
    assert(read_one(place, opened, "d/packed", NULL) == TIERFS_BEING_WRITTEN);
    in_child(place, end_of_writing);

    assert(read_one(place, opened, "d/packed", evict_packed) == TIERFS_CHANGED);
    assert(read_one(place, opened, "d/packed", NULL) == TIERFS_ABSENT);
    in_child(place, return_packed);
    assert(read_one(place, opened, "d/packed", move_packed) == TIERFS_CHANGED);
    assert(read_one(place, opened, "d/packed", NULL) == TIERFS_LOCAL);
    in_child(place, return_packed);
    /* Places in segments are given out once: the record that came back speaks of the same bytes. */
    assert(read_one(place, opened, "d/packed", evict_and_return_packed) == TIERFS_LOCAL);

    assert(read_one(place, opened, "d/own", replace_own_file) == TIERFS_CHANGED);
    in_child(place, return_own_file);
    assert(read_one(place, opened, "d/own", NULL) == TIERFS_LOCAL);
}

/* One open is for all that lie in a segment; so is its failure. */
static void test_a_segment_that_is_gone(const struct place *place, struct opened *opened)
{
    enum {
        COUNT = 3
    };
    static const char *const paths[COUNT] = {"d/packed", "default", "d/packed"};
    struct tierfs_wanted files[COUNT];
    char *memory = malloc(COUNT * packed.size_bytes);
    char path[2 * PATH_BYTES], aside[2 * PATH_BYTES + 8];

    assert(memory != NULL);
    path_in_tier(place, &packed, path);
    snprintf(aside, sizeof(aside), "%s.aside", path);
    for (int is_there = 0; is_there < 2; is_there++) {
        assert((is_there ? rename(aside, path) : rename(path, aside)) == 0);
        for (size_t i = 0; i < COUNT; i++) {
            files[i] = wanted(paths[i]);
            files[i].destination = memory + i * packed.size_bytes;
        }
        assert(tierfs_batch_plan(opened->lane, &opened->caller, files, COUNT, false) == 0);
        tierfs_batch_read(opened->lane, files, COUNT);
        for (size_t i = 0; i < COUNT; i++) {
            assert(files[i].outcome == (is_there ? TIERFS_LOCAL : TIERFS_CHANGED));
            for (uint64_t at = 0; is_there && at < files[i].size_bytes; at++)
                assert(files[i].destination[at] == byte_at(files[i].ino, at));
        }
    }
    free(memory);
}

static void test_index_of_another_boot(const struct place *place)
{
    struct tierfs_index *index;

    assert(tierfs_index_open(place->index, "another", &index) == -EPROTO);
    assert(tierfs_index_open(place->names, BOOT, &index) < 0);
    assert(tierfs_index_open("/nowhere", BOOT, &index) == -ENOENT);
}

/* Whatever is in the data base, nothing behind the end of a record is looked at, and no impossible one is taken. */
static void test_records(void)
{
    uint8_t record[RECORD_MAX];
    struct tierfs_extent extent;
    const size_t length = make_record(record, &own_file, 15, 3);
    uint8_t *exact;

    assert(tierfs_extent_decode(record, length, 0, 3, &extent) == 0);
    assert(extent.present == 15 && extent.unverified == 0 && extent.sum_count == 4);
    assert(tierfs_extent_decode(record, length, 0, 4, &extent) == 0 && extent.unverified == 15);
    assert(tierfs_extent_decode(record, length, 1, 3, &extent) == -EUCLEAN);
    for (size_t cut = 0; cut < length; cut++) {
        exact = malloc(cut > 0 ? cut : 1);
        assert(exact != NULL);
        memcpy(exact, record, cut);
        assert(tierfs_extent_decode(exact, cut, 0, 3, &extent) == -EUCLEAN);
        free(exact);
    }
    for (size_t at = 0; at < 64; at++)
        for (unsigned bit = 0; bit < 8; bit++) {
            record[at] ^= (uint8_t)(1u << bit);
            if (tierfs_extent_decode(record, length, 0, 3, &extent) == 0)
                assert(extent.sum_count <= TIERFS_EXTENT_BLOCKS &&
                       (extent.present & ~tierfs_block_mask(extent.sum_count)) == 0);
            record[at] ^= (uint8_t)(1u << bit);
        }
    assert(tierfs_blocks_in_extent(0, 0) == 0 && tierfs_blocks_in_extent(1, 0) == 1);
    assert(tierfs_blocks_in_extent(UINT64_MAX, 0) == TIERFS_EXTENT_BLOCKS);
    assert(tierfs_blocks_in_extent(TIERFS_EXTENT_BYTES + 1, 1) == 1 && tierfs_block_mask(64) == UINT64_MAX);
}

static void test_ring(const struct place *place, bool in_turn)
{
    enum {
        COUNT = 300,
        LENGTH = 100
    };
    struct tierfs_ring *ring;
    struct tierfs_call calls[COUNT];
    char *memory = calloc(COUNT, LENGTH);
    char path[2 * PATH_BYTES];
    int fd;

    assert(memory != NULL && tierfs_ring_open(in_turn, &ring) == 0);
    assert(!in_turn || !tierfs_ring_is_real(ring));
    path_in_tier(place, &own_file, path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    assert(fd >= 0);
    for (size_t i = 0; i < COUNT; i++)
        calls[i] = (struct tierfs_call){.kind = TIERFS_CALL_READ,
                                        .descriptor = i == 7 ? -1 : fd,
                                        .buffer = memory + i * LENGTH,
                                        .length = LENGTH,
                                        .offset = i == 9 ? own_file.size_bytes - 10 : i * 1000};
    calls[3] = (struct tierfs_call){.kind = TIERFS_CALL_OPEN, .descriptor = AT_FDCWD, .path = path};
    calls[4] = (struct tierfs_call){.kind = TIERFS_CALL_OPEN, .descriptor = AT_FDCWD, .path = "/nowhere"};
    tierfs_ring_run(ring, calls, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        if (i == 3 || i == 4 || i == 7 || i == 9)
            continue;
        assert(calls[i].result == LENGTH);
        for (size_t at = 0; at < LENGTH; at++)
            assert(memory[i * LENGTH + at] == byte_at(OWN_FILE, i * 1000 + at));
    }
    assert(calls[3].result >= 0 && calls[4].result == -ENOENT && calls[7].result == -EBADF &&
           calls[9].result == 10);
    close(calls[3].result);
    close(fd);
    tierfs_ring_run(ring, calls, 0);
    tierfs_ring_close(ring);
    free(memory);
}

int main(void)
{
    struct place place;
    struct opened opened;

    test_records();
    make_place(&place);
    test_ring(&place, true);
    test_ring(&place, false);
    test_index_of_another_boot(&place);
    open_place(&place, &opened);
    test_outcomes(&opened);
    test_access(&opened);
    test_many_at_once(&opened);
    test_a_segment_that_is_gone(&place, &opened);
    test_what_changes_in_between(&place, &opened);
    close_place(&opened);
    remove_place(&place);
    return 0;
}
