//! Resizes a container by its memory limit, as a virtio-mem device resizes a VM.
//!
//! The requested size is the limit that the container must reach. The plugged size is the limit in
//! force, which the kernel enforces. A container that uses more than the requested size stays above
//! it, like a guest that gives back nothing.

use crate::agent::links::monitor::{Shared, Sizes};
use hecaton_memory::cgroup::{CgroupError, Group};
use hecaton_vm::create::{BLOCK_BYTES, Memory};
use hecaton_vm::memory_device::MemoryDevice;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// How long nothing is taken from a container that did not come down to its limit, unless that is
/// another one: the kernel takes away its file pages at each try.
const PAUSE: Duration = Duration::from_secs(1);

/// The way to it.
#[derive(Debug)]
pub(crate) struct ContainerLink {
    group: Group,
    base_bytes: u64,
    more_bytes: u64,
    /// The limit that it is to have; none before the first look.
    wanted_bytes: Option<u64>,
    /// The last try to bring it down came to less than that.
    tried: Option<Instant>,
}

impl ContainerLink {
    /// To one that has `base_bytes` as long as it runs, and up to `more_bytes` beyond that. It is
    /// asked for what it has until somebody says another size.
    pub(crate) fn new(group: Group, base_bytes: u64, more_bytes: u64) -> ContainerLink {
        ContainerLink { group, base_bytes, more_bytes, wanted_bytes: None, tried: None }
    }

    /// Does what is to be done. The sizes that were asked for, and the device after that; none of
    /// one that has one size.
    pub(crate) fn visit(
        &mut self,
        desk: &Shared,
    ) -> Result<(Sizes, Vec<MemoryDevice>), CgroupError> {
        if desk.takes_power_down() {
            self.group.signal(Signal::TERM)?;
        }
        if desk.takes_quit() {
            self.group.kill()?;
        }
        let sizes = desk.sizes();
        let asked = sizes.get(&Memory::device_id(0)).map(|(_, bytes)| *bytes);
        let device = self.adjust(asked, Instant::now())?;
        Ok((sizes, Vec::from_iter((self.more_bytes > 0).then_some(device))))
    }

    /// Moves the limit to `asked_bytes` beyond the minimum, or to what was asked for before, as far
    /// as it goes.
    fn adjust(
        &mut self,
        asked_bytes: Option<u64>,
        now: Instant,
    ) -> Result<MemoryDevice, CgroupError> {
        let most = self.base_bytes + self.more_bytes;
        let mut limit = self.group.limit_bytes()?;
        let before = self.wanted_bytes;
        let asked = asked_bytes.map(|bytes| self.base_bytes.saturating_add(bytes).min(most));
        let wanted = asked.or(before).unwrap_or(limit.clamp(self.base_bytes, most));
        self.wanted_bytes = Some(wanted);
        let is_paused = before == Some(wanted) && self.tried.is_some_and(|at| now < at + PAUSE);
        if limit < wanted {
            self.group.raise(wanted)?;
            limit = wanted;
        } else if limit > wanted && !is_paused {
            limit = self.group.lower(wanted)?;
            self.tried = (limit > wanted).then_some(now);
        }
        // One that somebody else has raised is brought down again; until then what it has counts.
        let plugged = limit.min(most).saturating_sub(self.base_bytes);
        Ok(MemoryDevice {
            id: Memory::device_id(0),
            backend: String::new(),
            guest_node: 0,
            block_bytes: BLOCK_BYTES,
            max_bytes: self.more_bytes,
            requested_bytes: wanted - self.base_bytes,
            plugged_bytes: plugged.next_multiple_of(BLOCK_BYTES),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    const M: u64 = 1 << 20;

    fn group(dir: &Path, limit_bytes: u64) -> Group {
        fs::write(dir.join("memory.max"), format!("{limit_bytes}\n")).unwrap();
        fs::write(dir.join("memory.high"), "max\n").unwrap();
        fs::write(dir.join("memory.current"), "0\n").unwrap();
        Group::at(dir).expect("a group")
    }

    /// Requested and plugged size above the minimum, in MiB.
    fn sizes(device: MemoryDevice) -> (u64, u64) {
        (device.requested_bytes / M, device.plugged_bytes / M)
    }

    #[test]
    fn the_limit_in_force_is_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let mut link = ContainerLink::new(group(dir.path(), 64 * M), 64 * M, 192 * M);
        let now = Instant::now();
        let mut adjust = |asked: Option<u64>, has: u64, seconds: u64| {
            fs::write(dir.path().join("memory.current"), (has * M).to_string()).unwrap();
            let now = now + Duration::from_secs(seconds);
            sizes(link.adjust(asked.map(|mib| mib * M), now).unwrap())
        };
        assert_eq!(adjust(None, 10, 0), (0, 0));
        assert_eq!(adjust(Some(128), 10, 0), (128, 128), "at once");
        assert_eq!(adjust(None, 180, 1), (128, 128));
        assert_eq!(adjust(Some(64), 160, 2), (64, 106), "and 10 MiB to spare");
        assert_eq!(adjust(None, 100, 2), (64, 106), "not without end");
        assert_eq!(adjust(None, 100, 3), (64, 64));
        assert_eq!(adjust(Some(0), 100, 3), (0, 44), "another size");
        assert_eq!(adjust(Some(32), 100, 3), (32, 44), "another one again");
        assert_eq!(adjust(Some(999), 100, 3), (192, 192), "no more than its maximum");
        // Somebody else has taken the limit away, and the next look brings it back.
        fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(adjust(None, 100, 4), (192, 192));
        assert_eq!(fs::read_to_string(dir.path().join("memory.max")).unwrap(), "268435456");
    }

    #[test]
    fn one_that_is_found_is_asked_for_what_it_has() {
        for (limit, expected) in [(100, (36, 36)), (1, (0, 0)), (9999, (192, 192))] {
            let dir = tempfile::tempdir().unwrap();
            let mut link = ContainerLink::new(group(dir.path(), limit * M), 64 * M, 192 * M);
            let found = link.adjust(None, Instant::now()).unwrap();
            assert_eq!(sizes(found), expected, "{limit}");
        }
    }
}
