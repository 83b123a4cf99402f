//! Locks an authority for one process at a time.
//!
//! A command waits for the one that works on the authority, which takes some milliseconds: nodes
//! join while an administrator issues certificates.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long another command may work on the authority.
const PATIENCE: Duration = Duration::from_secs(3);

/// Between two attempts: the kernel has no lock of a file that waits with a limit.
const PAUSE: Duration = Duration::from_millis(50);

/// Nobody else has the authority until this is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    _dir: File,
}

impl Lock {
    /// Locks the authority in `dir`. None if another command has it for too long.
    pub(super) fn take(dir: &Path) -> io::Result<Option<Lock>> {
        Lock::take_within(dir, PATIENCE)
    }

    fn take_within(dir: &Path, patience: Duration) -> io::Result<Option<Lock>> {
        let locked = File::open(dir)?;
        let begun = Instant::now();
        loop {
            match flock(&locked, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Lock { _dir: locked })),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < patience => thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_waits_for_who_has_it_and_not_for_ever() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = Lock::take(dir.path()).expect("locked").expect("nobody has it");
        assert!(Lock::take_within(dir.path(), Duration::ZERO).expect("asked").is_none());
        let dir = dir.path();
        thread::scope(|scope| {
            let long = Duration::from_secs(3600);
            let second = scope.spawn(move || Lock::take_within(dir, long));
            drop(first);
            second.join().expect("no panic").expect("locked").expect("it is free");
        });
    }
}
