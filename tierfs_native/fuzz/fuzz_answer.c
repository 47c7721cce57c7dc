/*
 * Arbitrary FUSE messages, asked of a small and sound namespace.
 *
 * An input: two bytes that choose the room for the reply, then header and body of a message.
 */
#include "../tests/namespace.h"
#include "replies.h"

#define NOW INT64_C(1700000000000000000)
#define FILES 40

static struct tierfs_view *view;
static struct tierfs_reader *reader;
static struct tierfs_answers *answers;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
/* Of libFuzzer, which otherwise would change nothing by itself; without it, replay_main.c does half of them. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static void make_namespace(const char *directory)
{
    struct writer writer;
    struct tierfs_inode inode = {.ino = 1,
                                 .mode = S_IFDIR | 0755,
                                 .nlink = 2,
                                 .valid_until_ns = INT64_MAX,
                                 .listed_until_ns = NOW + 1000};

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    put_inode(&writer, &inode);
    for (uint64_t ino = 2; ino < FILES; ino++) {
        static const uint32_t types[] = {S_IFREG, S_IFREG, S_IFDIR, S_IFLNK, S_IFCHR};
        char name[TIERFS_NAME_MAX + 1];

        inode.ino = ino;
        inode.mode = types[ino % 5] | 0644;
        inode.nlink = (uint32_t)(ino % 7);
        inode.flags = ino * 37 % 128;
        inode.size_bytes = ino << ino % 50;
        inode.valid_until_ns = ino % 3 == 0 ? INT64_MAX : NOW + (int64_t)(ino % 5) - 2;
        inode.listed_until_ns = types[ino % 5] == S_IFDIR ? NOW + (int64_t)(ino % 3) - 1 : 0;
        put_inode(&writer, &inode);
        memset(name, 'a' + (int)(ino % 26), sizeof(name));
        name[1 + ino * 6] = 0;
        put_name_of(&writer, ino % 4 == 0 ? 7 : 1, name, ino, inode.mode & S_IFMT, 16 + ino);
        if (types[ino % 5] == S_IFLNK)
            put_symlink(&writer, ino, name);
    }
    writer_close(&writer);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const struct tierfs_answer_settings settings = {.ttl_ns = 60, .negative_ttl_ns = 30, .file_mode = 0644};
    char directory[PATH_BYTES];

    (void)argc, (void)argv;
    make_directory(directory);
    make_namespace(directory);
    assert(tierfs_view_open(directory, &view) == 0);
    remove_directory(directory); /* what is open stays, and nothing is left behind */
    assert(tierfs_reader_open(view, &reader) == 0);
    assert(tierfs_answers_open(&settings, &answers) == 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuse_in_header header;
    uint16_t room;

    if (size < sizeof(room) + sizeof(header))
        return 0;
    memcpy(&room, data, sizeof(room));
    memcpy(&header, data + sizeof(room), sizeof(header));
    size -= sizeof(room) + sizeof(header);
    data += sizeof(room) + sizeof(header);
    ask_and_check(answers, reader, NOW, &header, data, size, room);
    return 0;
}

/* -- inputs that come further than noise ------------------------------------------------------------------------- */

static unsigned int next(unsigned int *state, unsigned int below)
{
    *state = *state * 1103515245 + 12345;
    return (*state >> 16) % below;
}

/* A sound message of a random kind. Returns its size. */
static size_t make_message(uint8_t *message, unsigned int *random)
{
    static const uint32_t opcodes[] = {FUSE_LOOKUP,    FUSE_GETATTR, FUSE_READLINK,     FUSE_GETXATTR,
                                       FUSE_LISTXATTR, FUSE_OPENDIR, FUSE_READDIR,      FUSE_READDIRPLUS,
                                       FUSE_FORGET,    FUSE_ACCESS,  FUSE_BATCH_FORGET, FUSE_RELEASEDIR};
    static const char *const attributes[] = {"user.a", "system.b", "security.capability", "user.tierfs.x",
                                             "c"};
    struct fuse_in_header header = {.opcode = opcodes[next(random, 12)], .nodeid = next(random, FILES + 2)};
    uint8_t *body = message + sizeof(header);
    size_t bytes = 0;

    switch (header.opcode) {
    case FUSE_LOOKUP:
        bytes = 1 + next(random, 300);
        memset(body, 'a' + (int)next(random, 26), bytes);
        body[bytes++] = 0;
        break;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS: {
        struct fuse_read_in read = {.fh = TIERFS_FH_FRONT | header.nodeid,
                                    .offset = next(random, FILES + 20),
                                    .size = next(random, 5000)};

        memcpy(body, &read, bytes = sizeof(read));
        break;
    }
    case FUSE_BATCH_FORGET: {
        struct fuse_batch_forget_in batch = {.count = next(random, 10)};
        struct fuse_forget_one one = {.nlookup = 1};

        memcpy(body, &batch, bytes = sizeof(batch));
        for (unsigned int i = 0; i < batch.count; i++, bytes += sizeof(one)) {
            one.nodeid = next(random, FILES);
            memcpy(body + bytes, &one, sizeof(one));
        }
        break;
    }
    case FUSE_GETXATTR: {
        const char *name = attributes[next(random, 5)];

        memset(body, 0, sizeof(struct fuse_getxattr_in));
        bytes = sizeof(struct fuse_getxattr_in) + strlen(name) + 1;
        memcpy(body + sizeof(struct fuse_getxattr_in), name, strlen(name) + 1);
        break;
    }
    default:
        memset(body, 0, bytes = next(random, 48));
    }
    memcpy(message, &header, sizeof(header));
    return sizeof(header) + bytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    uint8_t input[1024];
    unsigned int random = seed;

    if (LLVMFuzzerMutate != NULL && next(&random, 4) != 0)
        return LLVMFuzzerMutate(data, size, max_size);
    uint16_t room = (uint16_t)(next(&random, 2) ? 4096 + next(&random, 10000) : next(&random, 65536));

    memcpy(input, &room, sizeof(room));
    size = sizeof(room) + make_message(input + sizeof(room), &random);
    for (unsigned int i = next(&random, 4); i > 0; i--)
        input[next(&random, (unsigned int)size)] ^= (uint8_t)(1u << next(&random, 8));
    size -= next(&random, 4) == 0 ? next(&random, 20) : 0;
    size = size < max_size ? size : max_size;
    memcpy(data, input, size);
    return size;
}
