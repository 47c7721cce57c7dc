#include "batch_lane.h"

#include <errno.h>
#include <stdlib.h>

int tierfs_lane_open(const struct tierfs_batch *batch, struct tierfs_lane **lane)
{
    struct tierfs_lane *made = calloc(1, sizeof(*made));
    int result;

    if (made == NULL)
        return -ENOMEM;
    made->batch = batch;
    result = tierfs_reader_open(batch->view, &made->names);
    for (size_t i = 0; i < batch->tier_count && result == 0; i++)
        result = tierfs_index_reader_open(batch->tiers[i].index, &made->indexes[i]);
    if (result == 0)
        result = tierfs_ring_open(false, &made->ring);
    if (result < 0) {
        tierfs_lane_close(made);
        return result;
    }
    *lane = made;
    return 0;
}

void tierfs_lane_close(struct tierfs_lane *lane)
{
    if (lane == NULL)
        return;
    tierfs_ring_close(lane->ring);
    for (size_t i = 0; i < TIERFS_BATCH_TIERS; i++)
        tierfs_index_reader_close(lane->indexes[i]);
    tierfs_reader_close(lane->names);
    free(lane->pieces);
    free(lane->sums);
    free(lane);
}

bool tierfs_lane_has_ring(const struct tierfs_lane *lane)
{
    return tierfs_ring_is_real(lane->ring);
}
