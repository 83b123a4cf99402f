//! Keeps what a process has in its host's memory: none of it is swapped out.
//!
//! For processes that the kernel needs to swap, or that others wait for.

use rustix::io::Errno;
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Why memory is not kept.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The process could not map what it needs later. The limit is in bytes.
    #[error(
        "the limit of locked memory is {} KiB; raise it (`ulimit -l unlimited`), or run this as \
         root",
        .0 / 1024
    )]
    Limit(u64),
    /// The kernel refuses.
    #[error("the kernel does not lock this process's memory")]
    Refused(#[from] Errno),
}

/// Locks all that this process has mapped and will map, each page from its first use on. A page
/// that is swapped out now is locked at its next use. Programs that the process starts do not
/// inherit the locks.
///
/// Under a limit, all that is mapped would count, used or not, and a later mapping fail. So a
/// process with one is refused, unless it has CAP_IPC_LOCK. To be called before the process has
/// other threads that lock memory: for a moment they may not.
pub fn lock_process() -> Result<(), LockError> {
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    let limits = getrlimit(Resource::Memlock);
    let Some(limit) = limits.current else { return Ok(rustix::mm::mlockall(all)?) };
    // With a limit of nothing the kernel asks for the capability, and for nothing else.
    setrlimit(Resource::Memlock, Rlimit { current: Some(0), ..limits })?;
    let locked = rustix::mm::mlockall(all);
    setrlimit(Resource::Memlock, limits)?;
    locked.map_err(|error| match error {
        Errno::PERM => LockError::Limit(limit),
        error => LockError::Refused(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    /// The memory is of the process, the capabilities are of the thread that asks.
    #[test]
    fn a_process_with_a_limit_needs_the_capability() {
        let before = getrlimit(Resource::Memlock);
        let most = before.maximum.map_or(8 << 20, |most| most.min(8 << 20));
        setrlimit(Resource::Memlock, Rlimit { current: Some(most), ..before }).unwrap();
        let limited = getrlimit(Resource::Memlock);
        let mut sets = capabilities(None).unwrap();
        let may = sets.effective.contains(CapabilitySet::IPC_LOCK);
        if may {
            lock_process().unwrap();
            assert_eq!(getrlimit(Resource::Memlock), limited);
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, sets).unwrap();
        }
        let refused = lock_process().unwrap_err().to_string();
        assert_eq!(getrlimit(Resource::Memlock), limited);
        setrlimit(Resource::Memlock, before).unwrap();
        let said = format!("{} KiB", most / 1024);
        assert!(refused.contains(&said) && refused.contains("ulimit"), "{refused}");
    }
}
