//! Reserves memory in advance for a process through which the kernel swaps.
//!
//! The kernel writes pages out because it lacks memory. If the process that takes them asked for
//! memory to do so, each might wait for the other for ever. So the process has all that a write can
//! need before the first one comes. Its present and future mappings are locked. Its heap has a
//! reserve that never goes back to the kernel. The kernel's own allocations for it (for sockets) do
//! not wait for other pages to be written.

use crate::State;
use rustix::io::Errno;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;
use std::fs;

/// Heap beyond what is in use, in bytes. It is twice what 16 requests of the longest kind, and the
/// connections to 7 donors, take at once.
pub const HEAP_BYTES: usize = 128 << 20;

/// The kernel kills others first.
const OOM_SCORE_ADJ: &str = "-1000";

/// Memory cannot be locked.
#[derive(Debug, thiserror::Error)]
#[error("the volume's process cannot lock its memory; swap takes root, or CAP_IPC_LOCK")]
pub struct ReserveError(#[source] Errno);

/// Reserves what this process needs before it has a volume. To be called before it has other
/// threads: those that come inherit it.
///
/// Settings that take CAP_SYS_RESOURCE are optional, since containers often lack it. They matter
/// when all of the host is out of memory, and not when a group is at its limit.
pub fn begin() -> Result<(), ReserveError> {
    let preferred = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ)
        .and_then(|()| Ok(configure_io_flusher_behavior(true)?));
    if let Err(error) = preferred {
        tracing::warn!(
            %error,
            "swap without CAP_SYS_RESOURCE: when the whole host is out of memory, and not only the \
             program at its limit, the process that serves it may be killed, or wait for itself"
        );
    }
    reserve_heap();
    lock(MlockAllFlags::CURRENT)
}

/// Reserves what a volume's tables need, and all that is mapped from here on.
pub fn finish(state: &State, is_encrypted: bool) -> Result<(), ReserveError> {
    state.touch(is_encrypted);
    // The tables have room for a larger volume, which stays untouched.
    lock(MlockAllFlags::CURRENT | MlockAllFlags::ONFAULT)?;
    lock(MlockAllFlags::FUTURE)
}

fn lock(flags: MlockAllFlags) -> Result<(), ReserveError> {
    mlockall(flags).map_err(ReserveError)
}

/// Gives the heap [`HEAP_BYTES`] more than it has, for good.
pub fn reserve_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt changes nothing that was allocated, and no other thread allocates yet.
    unsafe {
        // One heap for all threads, none of it mapped for one allocation alone or given back.
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
    }
    // Touched, for where memory is not locked; and seen, so that the allocation is not left out.
    drop(std::hint::black_box(vec![1u8; HEAP_BYTES]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{SEGMENT_PAGES, SLOTS};
    use hecaton_memory::PAGE_SIZE;
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn tables_have_all_of_their_memory_before_the_first_write() {
        let pages = 3 * SEGMENT_PAGES + 1;
        let state = State::create(pages).unwrap();
        let file = File::from(state.as_fd().try_clone_to_owned().unwrap());
        let taken = || file.metadata().unwrap().blocks() * 512;
        assert!(taken() < 1 << 20);
        state.touch(false);
        let slots = u64::from(SLOTS) * PAGE_SIZE as u64;
        let least = slots + pages * size_of::<u32>() as u64;
        assert!(taken() >= least, "{} bytes of {least}", taken());
        let before = taken();
        state.touch(true);
        assert!(taken() >= before + pages * 24, "seals have 24 bytes for each page");
    }
}
