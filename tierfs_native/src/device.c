#define _GNU_SOURCE
#include "device.h"

#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

struct tierfs_device {
    struct tierfs_origin origin; /* first: tierfs_origin.answer gets it */
    struct tierfs_device_links links;
    int descriptor;
    atomic_bool gone;
    char *mountpoint;
};

struct worker {
    struct tierfs_device *device;
    unsigned number;
};

static int answer_device(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    const struct tierfs_device *device = (const void *)origin;

    return write(device->descriptor, message, bytes) < 0 ? -errno : 0;
}

static int open_device(void)
{
    int descriptor = open("/dev/fuse", O_RDWR | O_CLOEXEC);

    return descriptor >= 0 ? descriptor : -errno;
}

int tierfs_device_mount(const struct tierfs_device_links *links, const char *mountpoint, const char *name,
                        const char *options, unsigned long flags, struct tierfs_device **device)
{
    struct tierfs_device *made = calloc(1, sizeof *made);
    struct stat root;
    char data[512];
    int result;

    if (made == NULL)
        return -ENOMEM;
    made->origin.answer = answer_device;
    made->links = *links;
    made->mountpoint = strdup(mountpoint);
    made->descriptor = open_device();
    result = made->descriptor < 0 ? made->descriptor : 0;
    if (result == 0 && (made->mountpoint == NULL || stat(mountpoint, &root) < 0))
        result = made->mountpoint == NULL ? -ENOMEM : -errno;
    if (result == 0) {
        int used =
            snprintf(data, sizeof data, "fd=%d,rootmode=%o,user_id=%u,group_id=%u%s%s", made->descriptor,
                     root.st_mode & S_IFMT, getuid(), getgid(), *options != '\0' ? "," : "", options);
        if (used < 0 || (size_t)used >= sizeof data)
            result = -E2BIG;
        else if (mount(name, mountpoint, "fuse.tierfs", flags, data) < 0)
            result = -errno;
    }
    if (result == 0) {
        *device = made;
        return 0;
    }
    if (made->descriptor >= 0)
        close(made->descriptor);
    free(made->mountpoint);
    free(made);
    return result;
}

int tierfs_device_descriptor(const struct tierfs_device *device)
{
    return device->descriptor;
}

static void note_gone(struct tierfs_device *device)
{
    uint64_t one = 1;

    if (!atomic_exchange(&device->gone, true) && write(device->links.gone, &one, sizeof one) < 0)
        tierfs_warning("nobody was told that the mount is gone  reason=\"%s\"", strerror(errno));
}

static void *read_requests(void *context)
{
    struct worker worker = *(struct worker *)context;
    struct tierfs_device *device = worker.device;
    /* The answer's bytes begin on a page of their own, behind a header. */
    char *message = aligned_alloc(4096, TIERFS_REQUEST_MAX_BYTES);
    char *answer = aligned_alloc(4096, TIERFS_REQUEST_MAX_BYTES);

    free(context);
    while (message != NULL && answer != NULL) {
        ssize_t bytes = read(device->descriptor, message, TIERFS_REQUEST_MAX_BYTES);
        if (bytes > 0) {
            device->links.handle(device->links.context, worker.number, message, (size_t)bytes,
                                 &device->origin, answer);
        } else if (bytes == 0 || errno == ENODEV) {
            break;
        } else if (errno != EINTR && errno != EAGAIN && errno != ENOENT) {
            tierfs_error("/dev/fuse cannot be read  reason=\"%s\"", strerror(errno));
            break;
        }
    }
    free(message);
    free(answer);
    note_gone(device);
    return NULL;
}

int tierfs_device_start(struct tierfs_device *device, unsigned workers)
{
    for (unsigned number = 0; number < workers; number++) {
        struct worker *worker = malloc(sizeof *worker);
        pthread_t thread;
        int error;

        if (worker == NULL)
            return -ENOMEM;
        *worker = (struct worker){device, number};
        error = pthread_create(&thread, NULL, read_requests, worker);
        if (error != 0) {
            free(worker);
            return -error;
        }
        pthread_detach(thread);
    }
    return 0;
}

int tierfs_device_unmount(struct tierfs_device *device, int flags)
{
    return umount2(device->mountpoint, flags) < 0 ? -errno : 0;
}
