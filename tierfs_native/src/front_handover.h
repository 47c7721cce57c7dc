/*
 * What a new engine is told before all else: whether the mount is there, which handles are open, which files the kernel
 * reads by itself, and which files the front has opened (TIERFS_HELLO to TIERFS_HELLO_END).
 */
#pragma once

#include "front.h"

/* Main thread, once for each engine; takes no lock of the front. 0, or -ENOMEM: it does not know all. */
int tierfs_front_hand_over(struct tierfs_front *front);
