//! Locks an authority for one process at a time.
//!
//! A command waits for the one that works on the authority, which takes some milliseconds: nodes
//! join while an administrator issues certificates.

use super::{AuthorityError, io_error};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long another command may work on the authority.
const PATIENCE: Duration = Duration::from_secs(3);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// Nobody else has the authority until this is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    _dir: File,
}

impl Lock {
    /// Locks the authority in `dir`.
    pub(super) fn take(dir: &Path) -> Result<Lock, AuthorityError> {
        Lock::take_within(dir, PATIENCE)
    }

    fn take_within(dir: &Path, patience: Duration) -> Result<Lock, AuthorityError> {
        let locked = File::open(dir).map_err(|source| io_error(dir, source))?;
        let begun = Instant::now();
        loop {
            match flock(&locked, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock { _dir: locked }),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < patience => thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => return Err(AuthorityError::InUse(dir.to_owned())),
                Err(errno) => return Err(io_error(dir, errno.into())),
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
        let first = Lock::take(dir.path()).expect("nobody has it");
        let refused = Lock::take_within(dir.path(), Duration::ZERO);
        assert!(matches!(refused, Err(AuthorityError::InUse(_))), "{refused:?}");
        let dir = dir.path();
        thread::scope(|scope| {
            let long = Duration::from_secs(3600);
            let second = scope.spawn(move || Lock::take_within(dir, long));
            drop(first);
            second.join().expect("no panic").expect("it is free");
        });
    }
}
