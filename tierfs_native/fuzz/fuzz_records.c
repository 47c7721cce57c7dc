/*
 * Sound requests, asked of a namespace whose records are arbitrary.
 *
 * An input: rows of one byte for the table, one for the size of the key, two for that of the value, key, value.
 * Another process writes them: LMDB must not be open twice in one.
 */
#include "../tests/namespace.h"
#include "batch.h"
#include "replies.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define NOW INT64_C(1000)
#define INODES 5 /* numbers 1 to 4 are asked for */
#define ROW_HEAD 4
#define INPUT_MAX 65536

static struct tierfs_view *view;
static struct tierfs_reader *reader;
static struct tierfs_answers *answers;
static struct tierfs_batch batch;
static struct tierfs_lane *lane;
static int channel;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
/* Of libFuzzer, which otherwise would change nothing by itself; without it, replay_main.c does half of them. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static void write_rows(struct writer *writer, const uint8_t *data, size_t size)
{
    for (size_t i = DIRENT; i < TABLES; i++)
        assert(mdb_drop(writer->txn, writer->tables[i], 0) == 0);
    while (size >= ROW_HEAD) {
        uint16_t value_bytes;
        const size_t key_bytes = data[1];
        const size_t table = DIRENT + data[0] % (TABLES - DIRENT);

        memcpy(&value_bytes, data + 2, sizeof(value_bytes));
        data += ROW_HEAD;
        size -= ROW_HEAD;
        if (key_bytes + value_bytes > size)
            break;
        if (key_bytes != 0)
            put_raw(writer, (enum table)table, data, key_bytes, data + key_bytes, value_bytes);
        data += key_bytes + value_bytes;
        size -= key_bytes + value_bytes;
    }
    writer_commit(writer);
}

static void run_writer(const char *directory, int asked)
{
    static uint8_t data[INPUT_MAX];
    struct writer writer;
    ssize_t got = 0;

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    writer_commit(&writer);
    do {
        if (packet_send(asked, "", 1) != 1)
            break;
        got = packet_receive(asked, data, sizeof(data));
        if (got > 0)
            write_rows(&writer, data, (size_t)got);
    } while (got > 0);
    _exit(0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const struct tierfs_answer_settings settings = {.ttl_ns = 60, .negative_ttl_ns = 30, .file_mode = 0644};
    char directory[PATH_BYTES];
    int ends[2];
    char ready;
    pid_t child;

    (void)argc, (void)argv;
    make_directory(directory);
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    child = fork();
    assert(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        run_writer(directory, ends[1]);
    }
    close(ends[1]);
    channel = ends[0];
    assert(packet_receive(channel, &ready, 1) == 1);
    assert(tierfs_view_open(directory, &view) == 0);
    remove_directory(directory); /* what is open stays, and nothing is left behind */
    assert(tierfs_reader_open(view, &reader) == 0);
    assert(tierfs_answers_open(&settings, &answers) == 0);
    batch.view = view;
    assert(tierfs_lane_open(&batch, &lane) == 0);
    return 0;
}

static void ask(uint32_t opcode, uint64_t nodeid, const void *body, size_t body_bytes)
{
    const struct fuse_in_header header = {.opcode = opcode, .nodeid = nodeid};

    ask_and_check(answers, reader, NOW, &header, body, body_bytes, 8192);
}

static void ask_everything(uint64_t ino)
{
    const uint8_t nothing[64] = {0};
    const char attribute[] = "\0\0\0\0\0\0\0\0user.a";
    struct fuse_read_in read = {.fh = TIERFS_FH_FRONT | ino, .size = 8192};

    ask(FUSE_GETATTR, ino, nothing, sizeof(struct fuse_getattr_in));
    ask(FUSE_READLINK, ino, nothing, 0);
    ask(FUSE_GETXATTR, ino, attribute, sizeof(attribute));
    ask(FUSE_LISTXATTR, ino, nothing, sizeof(struct fuse_getxattr_in));
    ask(FUSE_OPENDIR, ino, nothing, sizeof(struct fuse_open_in));
    ask(FUSE_FORGET, ino, nothing, sizeof(struct fuse_forget_in));
    ask(FUSE_READDIR, ino, &read, sizeof(read));
    ask(FUSE_READDIRPLUS, ino, &read, sizeof(read));
    read.offset = 3;
    ask(FUSE_READDIRPLUS, ino, &read, sizeof(read));
    for (char name[2] = "a"; name[0] < 'e'; name[0]++)
        ask(FUSE_LOOKUP, ino, name, sizeof(name));
}

/* The same records, as batch reads resolve paths by them. */
static void resolve_paths(void)
{
    static const char *const paths[] = {"a", "b", "c/a", "d/b", "a/b/c", "a/a/a/a", "b/..", "c//a", ""};
    struct tierfs_wanted files[sizeof(paths) / sizeof(paths[0])];
    const struct tierfs_caller callers[] = {{.uid = 0, .overrides = true}, {.uid = 0, .gid = 7}};

    for (size_t who = 0; who < 2; who++) {
        for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
            files[i] = (struct tierfs_wanted){.path = paths[i], .path_bytes = strlen(paths[i])};
        if (tierfs_batch_plan(lane, &callers[who], files, sizeof(paths) / sizeof(paths[0]), true) < 0)
            continue;
        for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
            assert(files[i].outcome < TIERFS_OUTCOMES);
            assert(files[i].outcome != TIERFS_LOCAL ||
                   (files[i].ino != 0 && files[i].size_bytes <= INT64_MAX));
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char ready;

    if (size == 0 || size > INPUT_MAX)
        return 0;
    assert(packet_send(channel, data, size) == (ssize_t)size);
    assert(packet_receive(channel, &ready, 1) == 1);
    for (uint64_t ino = 1; ino < INODES; ino++)
        ask_everything(ino);
    resolve_paths();
    return 0;
}

/* -- inputs that come further than noise ------------------------------------------------------------------------- */

struct input {
    uint8_t bytes[4096];
    size_t size;
    unsigned int random;
};

static unsigned int next(struct input *input, unsigned int below)
{
    input->random = input->random * 1103515245 + 12345;
    return (input->random >> 16) % below;
}

/* A row; now and then of another size than it should have. */
static void add_row(struct input *input, enum table table, const void *key, size_t key_bytes,
                    const void *value, size_t value_bytes)
{
    uint16_t size = (uint16_t)(value_bytes - (value_bytes > 0 && next(input, 60) == 0));
    uint8_t *row = input->bytes + input->size;

    if (input->size + ROW_HEAD + key_bytes + value_bytes > sizeof(input->bytes))
        return;
    row[0] = (uint8_t)(table - DIRENT);
    row[1] = (uint8_t)key_bytes;
    memcpy(row + 2, &size, sizeof(size));
    memcpy(row + ROW_HEAD, key, key_bytes);
    memcpy(row + ROW_HEAD + key_bytes, value, size);
    input->size += ROW_HEAD + key_bytes + size;
}

static void add_file(struct input *input, uint64_t ino)
{
    static const uint32_t types[] = {S_IFDIR, S_IFDIR, S_IFREG, S_IFLNK, S_IFIFO, 0};
    const uint32_t type = types[next(input, 6)];
    const uint64_t parent = 1 + next(input, INODES - 1);
    const char name[2] = {(char)('a' + next(input, 4)), 0};
    const struct tierfs_inode inode = {
        .ino = ino,
        .mode = type | 0644,
        .nlink = next(input, 3),
        .flags = next(input, 128),
        .size_bytes = UINT64_C(1) << next(input, 64),
        .mtime_ns = -(int64_t)next(input, 1000),
        .valid_until_ns = next(input, 3) == 0 ? INT64_MAX : NOW + (int64_t)next(input, 100) - 50,
        .listed_until_ns = NOW + (int64_t)next(input, 100) - 50};
    const struct tierfs_dirent entry = {.ino = ino, .seq = 16 + ino, .type = type};
    struct {
        struct tierfs_dirseq head;
        char name[8];
    } seq = {{.ino = ino, .type = type}, "a"};
    uint8_t key[64];

    seq.name[0] = name[0];
    add_row(input, INODE, key, inode_key(key, ino), &inode, sizeof(inode));
    add_row(input, DIRENT, key, dirent_key(key, parent, name, 1), &entry, sizeof(entry));
    add_row(input, DIRSEQ, key, dirseq_key(key, parent, 16 + ino), &seq, sizeof(seq.head) + 1);
    tierfs_encode_key(key, ino);
    tierfs_encode_key(key + 8, parent);
    key[16] = (uint8_t)name[0];
    add_row(input, PARENT, key, 17, "", 0);
    if (type == S_IFLNK)
        add_row(input, SYMLINK, key, 8, "target", 6);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    struct input input = {.random = seed};

    if (LLVMFuzzerMutate != NULL && next(&input, 4) != 0)
        return LLVMFuzzerMutate(data, size, max_size);
    for (uint64_t ino = 1; ino < INODES; ino++)
        add_file(&input, ino);
    for (unsigned int i = next(&input, 6); i > 0; i--)
        input.bytes[next(&input, (unsigned int)input.size)] ^= (uint8_t)(1u << next(&input, 8));
    size = input.size < max_size ? input.size : max_size;
    memcpy(data, input.bytes, size);
    return size;
}
