/*
 * A FUSE file system that does nothing: what is left is what the kernel asks of
 * any daemon that answers in C.
 *
 *   null_daemon MOUNTPOINT <TREE        TREE: lines "SIZE PATH" of files;
 * directories are made as needed
 *
 * Names and sizes are in memory, bytes are zeros from one buffer, writes are
 * taken and forgotten, nothing is ever written anywhere. What the kernel
 * believes of a daemon that says so (attributes and names for a day, pages over
 * a close, no FLUSH, no extended attributes), it is told. Prints a line when it
 * is mounted; ends with the mount. Needs root. For benchmarks only: it trusts
 * what the kernel says, and gives up where memory ends.
 */
#define _GNU_SOURCE
#include "../src/abi.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    REQUEST_BYTES = 1024 * 1024 + 4096,
    READ_BYTES = 1024 * 1024,
    WORKERS = 4,
    BUCKETS = 1 << 18
};
static const uint64_t BELIEVED_S = 86400;

struct node {
    uint64_t parent, size;
    char *name; /* NULL: not there any more */
    bool is_directory;
    uint64_t hash_next, first_child, next_sibling, previous_sibling;
};

struct tree {
    pthread_mutex_t lock;
    struct node *nodes; /* the index is the inode number; 0 is no inode */
    uint64_t count, capacity;
    uint64_t buckets[BUCKETS];
};

struct worker {
    struct tree *tree;
    int device;
};

static uint64_t bucket_of(uint64_t parent, const char *name)
{
    uint64_t hash = parent * UINT64_C(0x9E3779B97F4A7C15) ^ UINT64_C(0xCBF29CE484222325);

    for (; *name != '\0'; name++)
        hash = (hash ^ (unsigned char)*name) * UINT64_C(0x100000001B3);
    return (hash ^ hash >> 32) % BUCKETS;
}

static uint64_t find(const struct tree *tree, uint64_t parent, const char *name)
{
    uint64_t number = tree->buckets[bucket_of(parent, name)];

    while (number != 0 &&
           (tree->nodes[number].parent != parent || strcmp(tree->nodes[number].name, name) != 0))
        number = tree->nodes[number].hash_next;
    return number;
}

static void link_in(struct tree *tree, uint64_t number, uint64_t parent, char *name)
{
    struct node *node = &tree->nodes[number];
    uint64_t *bucket = &tree->buckets[bucket_of(parent, name)];

    node->parent = parent;
    node->name = name;
    node->hash_next = *bucket;
    *bucket = number;
    node->previous_sibling = 0;
    node->next_sibling = tree->nodes[parent].first_child;
    if (node->next_sibling != 0)
        tree->nodes[node->next_sibling].previous_sibling = number;
    tree->nodes[parent].first_child = number;
}

static void take_out(struct tree *tree, uint64_t number)
{
    struct node *node = &tree->nodes[number];
    uint64_t *at = &tree->buckets[bucket_of(node->parent, node->name)];

    while (*at != number)
        at = &tree->nodes[*at].hash_next;
    *at = node->hash_next;
    if (node->previous_sibling != 0)
        tree->nodes[node->previous_sibling].next_sibling = node->next_sibling;
    else
        tree->nodes[node->parent].first_child = node->next_sibling;
    if (node->next_sibling != 0)
        tree->nodes[node->next_sibling].previous_sibling = node->previous_sibling;
    free(node->name);
    node->name = NULL;
}

static uint64_t make(struct tree *tree, uint64_t parent, const char *name, uint64_t size, bool is_directory)
{
    char *own = strdup(name);

    if (tree->count == tree->capacity) {
        tree->capacity = tree->capacity * 2 + 1024;
        tree->nodes = realloc(tree->nodes, tree->capacity * sizeof *tree->nodes);
    }
    if (own == NULL || tree->nodes == NULL)
        abort();
    tree->nodes[tree->count] = (struct node){.size = size, .is_directory = is_directory};
    link_in(tree, tree->count, parent, own);
    return tree->count++;
}

static void read_tree(struct tree *tree)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t bytes;

    tree->capacity = 1024;
    tree->nodes = calloc(tree->capacity, sizeof *tree->nodes);
    if (tree->nodes == NULL)
        abort();
    tree->count = FUSE_ROOT_ID + 1;
    tree->nodes[FUSE_ROOT_ID].is_directory = true;
    while ((bytes = getline(&line, &room, stdin)) > 0) {
        char *path, *rest;
        uint64_t size = strtoull(line, &path, 10), at = FUSE_ROOT_ID;

        line[bytes - 1] = '\0';
        for (char *part = strtok_r(path + 1, "/", &rest); part != NULL; part = strtok_r(NULL, "/", &rest)) {
            uint64_t found = find(tree, at, part);
            at = found != 0 ? found : make(tree, at, part, size, *rest != '\0');
        }
    }
    free(line);
}

static struct fuse_attr attributes(const struct tree *tree, uint64_t number)
{
    const struct node *node = &tree->nodes[number];
    uint64_t size = node->is_directory ? 4096 : node->size;

    return (struct fuse_attr){
        .ino = number,
        .size = size,
        .blocks = (size + 511) / 512,
        .mode = node->is_directory ? S_IFDIR | 0755 : S_IFREG | 0644,
        .nlink = node->is_directory ? 2 : 1,
        .blksize = 4096,
    };
}

static struct fuse_entry_out entry(const struct tree *tree, uint64_t number)
{
    return (struct fuse_entry_out){
        .nodeid = number,
        .entry_valid = BELIEVED_S,
        .attr_valid = BELIEVED_S,
        .attr = number != 0 ? attributes(tree, number) : (struct fuse_attr){0},
    };
}

static size_t list(const struct tree *tree, const struct fuse_in_header *request, bool with_attributes,
                   char *out)
{
    const struct fuse_read_in *asked = (const void *)(request + 1);
    size_t head = with_attributes ? FUSE_NAME_OFFSET_DIRENTPLUS : FUSE_NAME_OFFSET, used = 0;
    uint64_t number = asked->offset == 0 ? tree->nodes[request->nodeid].first_child
                                         : tree->nodes[asked->offset].next_sibling;

    for (; number != 0; number = tree->nodes[number].next_sibling) {
        const struct node *node = &tree->nodes[number];
        size_t name_bytes = strlen(node->name), bytes = (head + name_bytes + 7) & ~(size_t)7;
        struct fuse_dirent dirent = {
            .ino = number,
            .off = number,
            .namelen = (uint32_t)name_bytes,
            .type = (node->is_directory ? S_IFDIR : S_IFREG) >> 12,
        };

        if (used + bytes > asked->size)
            break;
        memset(out + used, 0, bytes);
        if (with_attributes) {
            struct fuse_entry_out found = entry(tree, number);
            memcpy(out + used, &found, sizeof found);
        }
        memcpy(out + used + head - sizeof dirent, &dirent, sizeof dirent);
        memcpy(out + used + head, node->name, name_bytes);
        used += bytes;
    }
    return used;
}

/* Bytes of the answer in ``out``, or -errno. */
static long change(struct tree *tree, const struct fuse_in_header *request, char *out)
{
    const char *body = (const char *)(request + 1);
    struct fuse_entry_out made;
    struct fuse_open_out opened = {.open_flags = FOPEN_KEEP_CACHE};
    uint64_t number;

    switch (request->opcode) {
    case FUSE_CREATE:
        number = make(tree, request->nodeid, body + sizeof(struct fuse_create_in), 0, false);
        made = entry(tree, number);
        memcpy(out, &made, sizeof made);
        memcpy(out + sizeof made, &opened, sizeof opened);
        return (long)(sizeof made + sizeof opened);
    case FUSE_MKDIR:
        number = make(tree, request->nodeid, body + sizeof(struct fuse_mkdir_in), 0, true);
        made = entry(tree, number);
        memcpy(out, &made, sizeof made);
        return (long)sizeof made;
    case FUSE_UNLINK:
    case FUSE_RMDIR:
        number = find(tree, request->nodeid, body);
        if (number == 0)
            return -ENOENT;
        take_out(tree, number);
        return 0;
    default: { /* FUSE_RENAME2, FUSE_RENAME */
        size_t head =
            request->opcode == FUSE_RENAME ? sizeof(struct fuse_rename_in) : sizeof(struct fuse_rename2_in);
        uint64_t directory = ((const struct fuse_rename_in *)(const void *)body)->newdir;
        const char *old = body + head, *new = old + strlen(old) + 1;
        char *own = strdup(new);

        number = find(tree, request->nodeid, old);
        if (number == 0 || own == NULL) {
            free(own);
            return -ENOENT;
        }
        take_out(tree, number);
        link_in(tree, number, directory, own);
        return 0;
    }
    }
}

static long answer(struct tree *tree, const struct fuse_in_header *request, char *out)
{
    const char *body = (const char *)(request + 1);
    uint64_t number;

    switch (request->opcode) {
    case FUSE_LOOKUP: {
        number = find(tree, request->nodeid, body);
        struct fuse_entry_out found = entry(tree, number); /* number 0: believed as well */
        memcpy(out, &found, sizeof found);
        return (long)sizeof found;
    }
    case FUSE_GETATTR:
    case FUSE_SETATTR: {
        struct fuse_attr_out found = {.attr_valid = BELIEVED_S, .attr = attributes(tree, request->nodeid)};
        memcpy(out, &found, sizeof found);
        return (long)sizeof found;
    }
    case FUSE_OPEN:
    case FUSE_OPENDIR: {
        struct fuse_open_out opened = {.open_flags = request->opcode == FUSE_OPEN ? FOPEN_KEEP_CACHE : 0};
        memcpy(out, &opened, sizeof opened);
        return (long)sizeof opened;
    }
    case FUSE_WRITE: {
        const struct fuse_write_in *asked = (const void *)body;
        struct fuse_write_out written = {.size = asked->size};
        if (asked->offset + asked->size > tree->nodes[request->nodeid].size)
            tree->nodes[request->nodeid].size = asked->offset + asked->size;
        memcpy(out, &written, sizeof written);
        return (long)sizeof written;
    }
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        return (long)list(tree, request, request->opcode == FUSE_READDIRPLUS, out);
    case FUSE_CREATE:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
        return change(tree, request, out);
    case FUSE_STATFS:
        memset(out, 0, sizeof(struct fuse_statfs_out));
        return (long)sizeof(struct fuse_statfs_out);
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        return 0;
    default: /* FLUSH, GETXATTR, FSYNC...: the kernel asks once for each of them
            */
        return -ENOSYS;
    }
}

static long initialise(const struct fuse_in_header *request, char *out)
{
    const struct fuse_init_in *asked = (const void *)(request + 1);
    const uint64_t wanted = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_DO_READDIRPLUS | FUSE_READDIRPLUS_AUTO |
                            FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_ATOMIC_O_TRUNC |
                            FUSE_HANDLE_KILLPRIV_V2;
    struct fuse_init_out said = {
        .major = FUSE_KERNEL_VERSION,
        .minor = FUSE_KERNEL_MINOR_VERSION,
        .max_readahead = asked->max_readahead,
        .flags = asked->flags & (uint32_t)wanted,
        .max_background = 1024,
        .congestion_threshold = 768,
        .max_write = READ_BYTES,
        .time_gran = 1,
        .max_pages = READ_BYTES / 4096,
    };

    memcpy(out, &said, sizeof said);
    return (long)sizeof said;
}

static void *work(void *context)
{
    const struct worker *worker = context;
    struct tree *tree = worker->tree;
    char *message = aligned_alloc(4096, REQUEST_BYTES), *out = aligned_alloc(4096, REQUEST_BYTES);
    char *zeros = calloc(1, READ_BYTES);

    if (message == NULL || out == NULL || zeros == NULL)
        abort();
    for (;;) {
        const struct fuse_in_header *request = (const void *)message;
        struct fuse_out_header header;
        struct iovec parts[2] = {{&header, sizeof header}, {out, 0}};
        ssize_t bytes = read(worker->device, message, REQUEST_BYTES - 1);
        long result;

        if (bytes < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (bytes <= 0)
            break; /* unmounted */
        message[bytes] = '\0';
        if (request->opcode == FUSE_FORGET || request->opcode == FUSE_BATCH_FORGET ||
            request->opcode == FUSE_INTERRUPT)
            continue;
        pthread_mutex_lock(&tree->lock);
        if (request->opcode == FUSE_READ) {
            const struct fuse_read_in *asked = (const void *)(request + 1);
            uint64_t size = tree->nodes[request->nodeid].size;
            uint64_t left = asked->offset < size ? size - asked->offset : 0;
            result = (long)(left < asked->size ? left : asked->size);
            parts[1].iov_base = zeros;
        } else {
            result = request->opcode == FUSE_INIT ? initialise(request, out) : answer(tree, request, out);
        }
        pthread_mutex_unlock(&tree->lock);
        parts[1].iov_len = result > 0 ? (size_t)result : 0;
        header = (struct fuse_out_header){
            .len = (uint32_t)(sizeof header + parts[1].iov_len),
            .error = result < 0 ? (int32_t)result : 0,
            .unique = request->unique,
        };
        if (writev(worker->device, parts, 2) < 0 && errno != ENOENT)
            perror("null_daemon: answer");
    }
    free(message);
    free(out);
    free(zeros);
    return NULL;
}

int main(int count, char **arguments)
{
    static struct tree tree = {.lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[WORKERS];
    struct worker worker = {.tree = &tree};
    char options[128];

    if (count != 2) {
        fprintf(stderr, "usage: null_daemon MOUNTPOINT <TREE\n");
        return 2;
    }
    read_tree(&tree);
    worker.device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (worker.device < 0) {
        perror("null_daemon: /dev/fuse");
        return 1;
    }
    (void)snprintf(options, sizeof options,
                   "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,"
                   "default_permissions",
                   worker.device);
    if (mount("null", arguments[1], "fuse.null", MS_NOSUID | MS_NODEV, options) < 0) {
        perror("null_daemon: mount");
        return 1;
    }
    for (unsigned number = 0; number < WORKERS; number++) {
        if (pthread_create(&threads[number], NULL, work, &worker) != 0)
            abort();
    }
    puts("mounted");
    (void)fflush(stdout);
    for (unsigned number = 0; number < WORKERS; number++)
        (void)pthread_join(threads[number], NULL);
    free(tree.nodes);
    return 0;
}
