/* FUSE over io_uring, without a kernel that speaks it: how messages are put together, counts and bounds, giving up. */
#include "uring.h"

#include "uring_message.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CAPACITY 65536u

static struct fuse_uring_req_header header;
static char *page; /* head room, then CAPACITY bytes of payload */
static char *payload;
static char copy[8192];

/* The parts of a request, as the kernel lays them out. Returns its size. */
static size_t put(uint32_t opcode, size_t operation_bytes, size_t payload_bytes)
{
    const struct fuse_in_header head = {
        .len = (uint32_t)(sizeof head + operation_bytes + payload_bytes), .opcode = opcode, .unique = 8};

    memset(&header, 0, sizeof header);
    memcpy(header.in_out, &head, sizeof head);
    for (size_t i = 0; i < operation_bytes; i++)
        header.op_in[i] = (char)(i + 1);
    for (size_t i = 0; i < payload_bytes; i++)
        payload[i] = (char)(i * 7);
    header.ring_ent_in_out.payload_sz = (uint32_t)payload_bytes;
    return head.len;
}

static void check(size_t operation_bytes, size_t payload_bytes)
{
    const size_t expected = put(FUSE_WRITE, operation_bytes, payload_bytes);
    char *message = NULL;

    assert(tierfs_uring_message(&header, payload, CAPACITY, copy, sizeof copy, &message) == expected);
    assert((message == copy) == (expected <= sizeof copy));
    assert((uintptr_t)message % 8 == 0);
    assert(memcmp(message, header.in_out, sizeof(struct fuse_in_header)) == 0);
    assert(memcmp(message + sizeof(struct fuse_in_header), header.op_in, operation_bytes) == 0);
    for (size_t i = 0; i < payload_bytes; i++)
        assert(message[sizeof(struct fuse_in_header) + operation_bytes + i] == (char)(i * 7));
}

static void refuse(size_t operation_bytes, size_t payload_bytes, int32_t len_off, uint32_t payload_off)
{
    char *message;
    struct fuse_in_header head;

    put(FUSE_WRITE, operation_bytes, payload_bytes);
    memcpy(&head, header.in_out, sizeof head);
    head.len += (uint32_t)len_off;
    memcpy(header.in_out, &head, sizeof head);
    header.ring_ent_in_out.payload_sz += payload_off;
    assert(tierfs_uring_message(&header, payload, CAPACITY, copy, sizeof copy, &message) == 0);
}

static void test_messages(void)
{
    char *message;

    page = aligned_alloc(4096, 4096 + CAPACITY);
    assert(page != NULL);
    payload = page + 4096;
    check(0, 0);
    check(0, 12); /* a name; its operation has no struct */
    check(40, 0);
    check(40, 8192 - 80);
    check(40, 8192 - 79);
    check(128, CAPACITY);
    assert(put(FUSE_WRITE, 7, 10) ==
           tierfs_uring_message(&header, payload, CAPACITY, copy, sizeof copy, &message));
    refuse(7, CAPACITY, 0, 0); /* would not be aligned */
    refuse(40, 10, -51, 0); /* shorter than its parts */
    refuse(40, 10, 0, CAPACITY); /* a payload larger than the buffer, or than the message */
    refuse(40, 10, 0, 41); /* nothing left for the rest */
    refuse(0, 10, 129, 0); /* an operation larger than its place */
    refuse(0, 0, -40, 0); /* no length at all */
    refuse(0, 0, 0, UINT32_MAX);
    free(page);
}

static void test_answers(void)
{
    struct fuse_out_header head;

    memset(&header, 0xff, sizeof header);
    header.ring_ent_in_out.commit_id = 77;
    tierfs_uring_answer_header(&header, 8, 100);
    memcpy(&head, header.in_out, sizeof head);
    assert(head.len == sizeof head + 100 && head.error == 0 && head.unique == 8);
    assert(header.ring_ent_in_out.payload_sz == 100 && header.ring_ent_in_out.commit_id == 77);
    tierfs_uring_answer_header(&header, 10, -ENOENT);
    memcpy(&head, header.in_out, sizeof head);
    assert(head.len == sizeof head && head.error == -ENOENT && head.unique == 10);
    assert(header.ring_ent_in_out.payload_sz == 0);
}

static void test_bounds(void)
{
    const size_t mebibyte = 1 << 20;

    assert(tierfs_uring_depth(0, mebibyte) == 0 && tierfs_uring_depth(1, 0) == 0);
    for (unsigned queues = 1; queues < 3000; queues++) {
        unsigned depth = tierfs_uring_depth(queues, mebibyte);
        assert(depth <= TIERFS_URING_MAX_DEPTH);
        assert((uint64_t)depth * queues * mebibyte <= TIERFS_URING_MEMORY_BYTES);
    }
    assert(tierfs_uring_depth(2, mebibyte) == TIERFS_URING_MAX_DEPTH &&
           tierfs_uring_depth(3000, mebibyte) == 0);
    assert(tierfs_uring_count_cpus("0\n") == 1 && tierfs_uring_count_cpus("0-3") == 4);
    assert(tierfs_uring_count_cpus("0,2-5,9\n") == 6);
    static const char *const wrong[] = {"", "\n", "a", "0-", "3-1", "0;1", "0-99999999", "0,", "1-2-3"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert(tierfs_uring_count_cpus(wrong[i]) == 0);
}

static int open_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;

    assert(directory != NULL);
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    return count;
}

/* What cannot be made leaves nothing behind. */
static void test_giving_up(void)
{
    const struct tierfs_uring_links links = {NULL, NULL};
    struct tierfs_uring *uring = NULL;
    int before = open_descriptors();

    assert(tierfs_uring_create(&links, -1, (size_t)1 << 40, &uring) == -E2BIG);
    assert(uring == NULL && open_descriptors() == before);
}

int main(void)
{
    test_messages();
    test_answers();
    test_bounds();
    test_giving_up();
    return 0;
}
