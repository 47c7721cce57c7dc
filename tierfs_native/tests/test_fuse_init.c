/* The answer to INIT: what is added, what is taken away, and what stays as the engine said it. */
#include "fuse_init.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ALL_FLAGS UINT32_MAX
#define PAGE_BYTES 4096u

struct init_answer {
    struct fuse_out_header header;
    struct fuse_init_out granted;
};

static struct init_answer answer_of_engine(void)
{
    return (struct init_answer){
        .header = {.len = sizeof(struct init_answer), .unique = 2},
        .granted = {.major = 7,
                    .minor = 31,
                    .flags = FUSE_ATOMIC_O_TRUNC | FUSE_MAX_PAGES,
                    .max_write = 1024 * 1024,
                    .max_pages = 256},
    };
}

static uint64_t flags_of(const struct init_answer *answer)
{
    return answer->granted.flags | (uint64_t)answer->granted.flags2 << 32;
}

static void test_what_is_no_answer_stays(void)
{
    const struct tierfs_init_terms terms = {.socket = -1};
    const struct fuse_init_in asked = {.flags = ALL_FLAGS, .flags2 = ALL_FLAGS};
    struct init_answer answer = answer_of_engine(), before;

    answer.header.error = -EPROTO;
    before = answer;
    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert(memcmp(&answer, &before, sizeof answer) == 0);
    answer.header.error = 0;
    before = answer;
    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer - 1);
    assert(memcmp(&answer, &before, sizeof answer) == 0);
}

static void test_only_what_is_offered_is_added(void)
{
    const struct tierfs_init_terms terms = {.socket = -1};
    struct fuse_init_in asked = {.flags = ALL_FLAGS, .flags2 = ALL_FLAGS};
    struct init_answer answer = answer_of_engine();

    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert((flags_of(&answer) & FUSE_PASSTHROUGH) != 0 && answer.granted.max_stack_depth == 1);
    assert((flags_of(&answer) & FUSE_PARALLEL_DIROPS) != 0);
    assert((flags_of(&answer) & FUSE_ATOMIC_O_TRUNC) != 0);
    assert((flags_of(&answer) & (FUSE_READDIRPLUS_AUTO | FUSE_OVER_IO_URING)) == 0);
    assert(answer.granted.max_background > answer.granted.congestion_threshold);

    asked.flags &= ~(uint32_t)FUSE_INIT_EXT; /* flags2 means nothing then */
    answer = answer_of_engine();
    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert((flags_of(&answer) & FUSE_PASSTHROUGH) == 0 && answer.granted.max_stack_depth == 0);

    asked.flags = 0;
    answer = answer_of_engine();
    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert(flags_of(&answer) == flags_of(&(struct init_answer){.granted = answer_of_engine().granted}));
}

static void test_terms(void)
{
    const struct tierfs_init_terms terms = {.socket = -1, .lists_plainly = true, .truncates_apart = true};
    const struct fuse_init_in asked = {.flags = ALL_FLAGS};
    struct init_answer answer = answer_of_engine();

    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert((flags_of(&answer) & FUSE_READDIRPLUS_AUTO) != 0);
    assert((flags_of(&answer) & FUSE_ATOMIC_O_TRUNC) == 0);
}

static void test_messages_fit_into_the_socket(void)
{
    const struct fuse_init_in asked = {.flags = ALL_FLAGS};
    struct init_answer answer = answer_of_engine();
    int sockets[2];
    int wanted = 64 * 1024, buffer;
    socklen_t size = sizeof buffer;

    assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0);
    assert(setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted) == 0);
    assert(getsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &buffer, &size) == 0);
    tierfs_init_amend(&(struct tierfs_init_terms){.socket = sockets[0]}, &asked, &answer.header,
                      sizeof answer);
    assert(answer.granted.max_write != 0 && answer.granted.max_write % PAGE_BYTES == 0);
    assert(answer.granted.max_write + sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) <
           (size_t)buffer);
    assert(answer.granted.max_pages * PAGE_BYTES == answer.granted.max_write);
    close(sockets[0]);
    close(sockets[1]);
}

struct ring {
    bool is_taken, was_offered;
    size_t payload_bytes;
};

static bool prepare_ring(void *context, bool is_offered, size_t payload_bytes)
{
    struct ring *ring = context;

    ring->was_offered = is_offered;
    ring->payload_bytes = payload_bytes;
    return ring->is_taken;
}

static void test_ring(void)
{
    struct ring ring = {.is_taken = true};
    const struct tierfs_init_terms terms = {.socket = -1, .prepare_ring = prepare_ring, .context = &ring};
    struct fuse_init_in asked = {.flags = ALL_FLAGS, .flags2 = ALL_FLAGS};
    struct init_answer answer = answer_of_engine();

    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert(ring.was_offered && ring.payload_bytes == 1024 * 1024);
    assert((flags_of(&answer) & FUSE_OVER_IO_URING) != 0);

    ring.is_taken = false;
    asked.flags2 = 0;
    answer = answer_of_engine();
    answer.granted.max_write = PAGE_BYTES;
    answer.granted.max_pages = 1;
    tierfs_init_amend(&terms, &asked, &answer.header, sizeof answer);
    assert(!ring.was_offered && ring.payload_bytes == FUSE_MIN_READ_BUFFER);
    assert((flags_of(&answer) & FUSE_OVER_IO_URING) == 0);
}

int main(void)
{
    test_what_is_no_answer_stays();
    test_only_what_is_offered_is_added();
    test_terms();
    test_messages_fit_into_the_socket();
    test_ring();
    return 0;
}
