//! A control group: `memory.high` of cgroup version 2.
//!
//! `memory.high` and not `memory.max`: above it the kernel takes pages back and slows the group
//! down, and kills nobody.

use super::{Progress, Sink, SinkError};
use crate::governor::Order;
use std::fs;
use std::path::{Path, PathBuf};

/// The directory of a group.
pub(crate) struct Cgroup {
    pub(crate) dir: PathBuf,
}

impl Cgroup {
    fn limit(&self, limit_bytes: u64) -> Result<(), SinkError> {
        let path = self.dir.join("memory.high");
        // Outside of a cgroup file system the write would make a file.
        if !path.exists() {
            return Err(SinkError::NoMemoryHigh(self.dir.clone()));
        }
        // The kernel takes pages back before it returns from this.
        let written = fs::write(&path, limit_bytes.to_string());
        written.map_err(|source| SinkError::Write { path, value: limit_bytes, source })
    }
}

impl Sink for Cgroup {
    fn tell(&mut self, order: &Order) -> Result<Progress, SinkError> {
        self.limit(order.limit_bytes)?;
        Ok(Progress::of(current_bytes(&self.dir)?, order.limit_bytes))
    }

    fn keep(&mut self, order: &Order) -> Result<(), SinkError> {
        self.limit(order.limit_bytes)
    }
}

fn current_bytes(dir: &Path) -> Result<u64, SinkError> {
    let path = dir.join("memory.current");
    let read = fs::read_to_string(&path).and_then(|text| {
        text.trim().parse().map_err(|_| std::io::Error::other(format!("it says `{}`", text.trim())))
    });
    read.map_err(|source| SinkError::Read { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::governor::Reason;
    use std::time::Duration;

    fn order(limit_bytes: u64) -> Order {
        Order {
            number: 1,
            limit_bytes,
            total_bytes: 0,
            within: Duration::ZERO,
            reason: Reason::Shrink,
        }
    }

    #[test]
    fn a_group_has_settled_once_it_is_below_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let mut group = Cgroup { dir: dir.path().to_owned() };
        let error = group.tell(&order(5)).expect_err("no group").to_string();
        assert!(error.contains("cgroup version 2"), "{error}");
        assert!(!dir.path().join("memory.high").exists(), "nothing is made");
        fs::write(dir.path().join("memory.high"), "max\n").unwrap();
        fs::write(dir.path().join("memory.current"), "8192\n").unwrap();
        assert_eq!(group.tell(&order(4096)).unwrap(), Progress::Draining);
        assert_eq!(fs::read_to_string(dir.path().join("memory.high")).unwrap(), "4096");
        fs::write(dir.path().join("memory.current"), "4096\n").unwrap();
        assert_eq!(group.tell(&order(4096)).unwrap(), Progress::Settled);
        fs::write(dir.path().join("memory.high"), "max\n").unwrap();
        group.keep(&order(4096)).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("memory.high")).unwrap(), "4096");
    }

    /// On the kernel's own files, where there are some and this user may make a group.
    #[test]
    fn a_real_group_is_limited() {
        let name = format!("hecaton-guest-{}", std::process::id());
        let dir = Path::new("/sys/fs/cgroup").join(name);
        if let Err(error) = fs::create_dir(&dir) {
            return println!("skipped: a_real_group_is_limited: cannot make {dir:?}: {error}");
        }
        let mut group = Cgroup { dir: dir.clone() };
        let told = group.tell(&order(64 << 20));
        let high = fs::read_to_string(dir.join("memory.high"));
        fs::remove_dir(&dir).unwrap();
        match told {
            Err(SinkError::NoMemoryHigh(_)) => println!(
                "skipped: a_real_group_is_limited: no memory controller of cgroup version 2 in \
                 /sys/fs/cgroup"
            ),
            told => {
                assert_eq!(told.unwrap(), Progress::Settled);
                assert_eq!(high.unwrap().trim(), (64u64 << 20).to_string());
            }
        }
    }
}
