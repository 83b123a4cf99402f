//! Descriptors that the node keeps for a child, so that they outlive it.
//!
//! For a pager this is what stands between its crash and silent loss: when the last copy of a
//! userfaultfd closes, the kernel serves zeros where the pool holds data.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors that are held for one child: a pager has a few for each process of its program.
pub const MAX_HELD: usize = 4096;

/// Descriptors by the labels that the child gave them, in the order in which it did.
#[derive(Debug, Default)]
pub struct HeldFds {
    held: Vec<(String, OwnedFd)>,
}

/// Why descriptors are not held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldError {
    /// More than [`MAX_HELD`].
    #[error("{0} descriptors would be held for one process; the limit is {MAX_HELD}")]
    TooMany(usize),
    /// Labels and descriptors do not match.
    #[error("{labels} labels came with {fds} descriptors")]
    Mismatch {
        /// How many labels.
        labels: usize,
        /// How many descriptors.
        fds: usize,
    },
}

impl HeldFds {
    /// Keeps `fds` under `labels`; one that is held under the same label already is replaced.
    pub fn hold(&mut self, labels: Vec<String>, fds: Vec<OwnedFd>) -> Result<(), HoldError> {
        if labels.len() != fds.len() {
            return Err(HoldError::Mismatch { labels: labels.len(), fds: fds.len() });
        }
        let added = labels.iter().filter(|label| self.position(label).is_none()).count();
        if self.held.len() + added > MAX_HELD {
            return Err(HoldError::TooMany(self.held.len() + added));
        }
        for (label, fd) in labels.into_iter().zip(fds) {
            match self.position(&label) {
                Some(at) => self.held[at].1 = fd,
                None => self.held.push((label, fd)),
            }
        }
        Ok(())
    }

    /// Lets go of what is held under `labels`.
    pub fn drop_labels(&mut self, labels: &[String]) {
        self.held.retain(|(label, _)| !labels.contains(label));
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.held.iter().map(|(label, fd)| (label.as_str(), fd.as_fd()))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn position(&self, label: &str) -> Option<usize> {
        self.held.iter().position(|(held, _)| held == label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;
    use rustix::process::{Resource, getrlimit, setrlimit};

    fn fd() -> OwnedFd {
        tempfile::tempfile().expect("a temporary file").into()
    }

    fn labels(held: &HeldFds) -> Vec<&str> {
        held.iter().map(|(label, _)| label).collect()
    }

    #[test]
    fn keeps_the_order_and_replaces_by_label() {
        let mut held = HeldFds::default();
        held.hold(vec!["a".into(), "b".into()], vec![fd(), fd()]).unwrap();
        let before = fstat(held.iter().next().unwrap().1).unwrap().st_ino;
        let replacement = fd();
        let expected = fstat(&replacement).unwrap().st_ino;
        held.hold(vec!["a".into(), "c".into()], vec![replacement, fd()]).unwrap();
        assert_eq!(labels(&held), ["a", "b", "c"]);
        let after = fstat(held.iter().next().unwrap().1).unwrap().st_ino;
        assert_eq!(after, expected);
        assert_ne!(after, before);
        held.drop_labels(&["b".into(), "x".into()]);
        assert_eq!(labels(&held), ["a", "c"]);
    }

    #[test]
    fn mismatched_ones_are_refused() {
        let mut held = HeldFds::default();
        assert_eq!(
            held.hold(vec!["a".into()], vec![]),
            Err(HoldError::Mismatch { labels: 1, fds: 0 })
        );
        assert!(held.is_empty());
    }

    #[test]
    fn too_many_are_refused_and_those_that_are_held_stay() {
        let mut limit = getrlimit(Resource::Nofile);
        if limit.maximum.is_some_and(|most| most < 2 * MAX_HELD as u64) {
            println!("skipped: too_many_are_refused: {limit:?} are too few descriptors");
            return;
        }
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit).unwrap();
        let one = fd();
        let mut held = HeldFds::default();
        let mut hold = |from: usize, to: usize| {
            let fds = (from..to).map(|_| one.try_clone().unwrap()).collect();
            let done = held.hold((from..to).map(|number| number.to_string()).collect(), fds);
            (done, held.len())
        };
        assert_eq!(hold(0, MAX_HELD - 1), (Ok(()), MAX_HELD - 1));
        let refused = Err(HoldError::TooMany(MAX_HELD + 1));
        assert_eq!(hold(MAX_HELD - 1, MAX_HELD + 1), (refused, MAX_HELD - 1));
        assert_eq!(hold(MAX_HELD - 1, MAX_HELD), (Ok(()), MAX_HELD));
        // One that takes another's place needs none.
        assert_eq!(hold(0, 1), (Ok(()), MAX_HELD));
    }
}
