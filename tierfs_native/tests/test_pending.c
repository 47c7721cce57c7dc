/* Requests without an answer: their order, finding them, what is unsent, and who frees a message that is being sent. */
#include "pending.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const struct tierfs_origin somewhere;

static struct tierfs_request *add(struct tierfs_pending *pending, uint64_t unique)
{
    char message[32];

    memset(message, (int)unique, sizeof message);
    struct tierfs_request *request = tierfs_pending_add(pending, unique, message, sizeof message, &somewhere);
    assert(request != NULL && request->unique == unique && request->origin == &somewhere &&
           request->bytes == 32);
    assert(memcmp(request->message, message, sizeof message) == 0);
    return request;
}

/* As the relay does: the first unsent is taken, and sent or not. */
static uint64_t send_next(struct tierfs_pending *pending, bool went)
{
    struct tierfs_request *request = pending->unsent;

    if (request == NULL)
        return 0;
    uint64_t unique = request->unique;
    pending->unsent = request->later;
    request->sending = true;
    tierfs_pending_sent(pending, request, went);
    return unique;
}

static void remove_all(struct tierfs_pending *pending)
{
    while (pending->first != NULL)
        tierfs_pending_remove(pending, pending->first);
    assert(pending->last == NULL && pending->unsent == NULL);
    assert(pending->count == 0 && pending->bytes == 0);
}

static void test_order_and_finding(struct tierfs_pending *pending)
{
    for (uint64_t unique = 2; unique <= 20000; unique += 2)
        add(pending, unique);
    assert(pending->count == 10000 && pending->bytes == 320000);
    for (uint64_t unique = 2; unique <= 20000; unique += 2) {
        assert(tierfs_pending_find(pending, unique)->unique == unique);
        assert(tierfs_pending_find(pending, unique + 1) == NULL);
    }
    for (uint64_t unique = 4; unique <= 20000; unique += 4)
        tierfs_pending_remove(pending, tierfs_pending_find(pending, unique));
    for (uint64_t unique = 2; unique <= 20000; unique += 4)
        assert(send_next(pending, true) == unique);
    assert(send_next(pending, true) == 0);
    remove_all(pending);
}

static void test_another_engine(struct tierfs_pending *pending)
{
    for (uint64_t unique = 2; unique <= 10; unique += 2)
        add(pending, unique);
    assert(send_next(pending, true) == 2);
    assert(send_next(pending, true) == 4);
    assert(send_next(pending, true) == 6);
    tierfs_pending_remove(pending, tierfs_pending_find(pending, 4));
    tierfs_pending_rewind(pending);
    assert(!tierfs_pending_find(pending, 2)->sent && tierfs_pending_find(pending, 2)->was_sent);
    assert(!tierfs_pending_find(pending, 8)->was_sent);
    for (uint64_t unique = 2; unique <= 10; unique += 2)
        if (unique != 4)
            assert(send_next(pending, true) == unique);
    assert(pending->unsent == NULL);
    assert(add(pending, 12) == pending->unsent);
    remove_all(pending);
}

static void test_what_did_not_go(struct tierfs_pending *pending)
{
    add(pending, 2);
    add(pending, 4);
    assert(send_next(pending, true) == 2);
    assert(send_next(pending, false) == 4); /* the socket was full */
    add(pending, 6);
    assert(send_next(pending, true) == 4);
    assert(send_next(pending, true) == 6);
    assert(pending->unsent == NULL);
    remove_all(pending);
}

/* Two threads send: the later request went, the earlier one did not. It alone is sent again. */
static void test_two_senders(struct tierfs_pending *pending)
{
    struct tierfs_request *first = add(pending, 2);
    pending->unsent = first->later;
    first->sending = true;
    struct tierfs_request *second = add(pending, 4);
    assert(pending->unsent == second);
    pending->unsent = second->later;
    second->sending = true;
    tierfs_pending_sent(pending, second, true);
    assert(pending->unsent == NULL);
    tierfs_pending_sent(pending, first, false);
    assert(pending->unsent == first);
    assert(send_next(pending, true) == 2);
    assert(pending->unsent == NULL); /* and the second not twice */
    remove_all(pending);
}

/* The answer can be there before send(2) has returned: whoever sends frees the message then. */
static void test_answered_while_it_is_sent(struct tierfs_pending *pending)
{
    struct tierfs_request *request = add(pending, 2);

    pending->unsent = request->later;
    request->sending = true;
    tierfs_pending_remove(pending, request);
    assert(tierfs_pending_find(pending, 2) == NULL && pending->count == 0);
    assert(request->answered && request->message[0] == 2);
    tierfs_pending_sent(pending, request, true);
    remove_all(pending);
}

int main(void)
{
    struct tierfs_pending *pending = calloc(1, sizeof *pending);

    assert(pending != NULL);
    test_order_and_finding(pending);
    test_another_engine(pending);
    test_what_did_not_go(pending);
    test_two_senders(pending);
    test_answered_while_it_is_sent(pending);
    free(pending);
    return 0;
}
