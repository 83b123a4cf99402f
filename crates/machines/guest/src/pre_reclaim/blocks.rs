//! The kernel's memory blocks (`/sys/devices/system/memory`): which of them virtio-mem has added,
//! which are offline.
//!
//! Only blocks of the movable zone are taken: in others there are pages that cannot be moved away.

use crate::sink::{Ending, run_program};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long blocks that are readied together may take to go offline. The kernel itself would try
/// for ever, and keep the driver waiting.
const PATIENCE: Duration = Duration::from_secs(2);

/// The kernel's name, in `/proc/iomem`, for memory of virtio-mem devices.
const NAME: &str = "System RAM (virtio_mem)";

/// Those of the kernel.
#[derive(Debug)]
pub(super) struct Blocks {
    root: PathBuf,
    block_bytes: u64,
    /// As it was last looked.
    plugged: BTreeSet<u64>,
    readied: BTreeSet<u64>,
    /// They did not go offline; not tried again until all are given back.
    kept: BTreeSet<u64>,
}

impl Blocks {
    /// Counts those that are offline already as readied.
    pub(super) fn open(root: PathBuf) -> io::Result<Blocks> {
        let path = root.join("sys/devices/system/memory/block_size_bytes");
        let text = fs::read_to_string(&path)?;
        let block_bytes = u64::from_str_radix(text.trim(), 16).ok().filter(|bytes| *bytes > 0);
        let block_bytes = block_bytes.ok_or_else(|| {
            io::Error::other(format!("{} says `{}`", path.display(), text.trim()))
        })?;
        let mut blocks = Blocks {
            root,
            block_bytes,
            plugged: BTreeSet::new(),
            readied: BTreeSet::new(),
            kept: BTreeSet::new(),
        };
        blocks.look()?;
        blocks.readied =
            blocks.plugged.iter().copied().filter(|block| blocks.is_offline(*block)).collect();
        Ok(blocks)
    }

    /// Looks what virtio-mem has added. Blocks that are there no more are readied no more.
    pub(super) fn look(&mut self) -> io::Result<()> {
        let text = fs::read_to_string(self.root.join("proc/iomem"))?;
        let ranges = text.lines().filter_map(range);
        let block = self.block_bytes;
        let blocks = ranges.flat_map(|range| (range.start() / block)..=(range.end() / block));
        // To unprivileged readers the kernel shows addresses of zero.
        self.plugged = blocks.filter(|number| *number > 0).collect();
        self.readied.retain(|number| self.plugged.contains(number));
        Ok(())
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    pub(super) fn readied_bytes(&self) -> u64 {
        self.readied.len() as u64 * self.block_bytes
    }

    /// Takes so many more offline; false if there is none to take. The lowest: the driver gives the
    /// highest ones first, and the two do not meet. They are fewer if one does not go.
    pub(super) fn ready(&mut self, count: u64, ending: &Ending) -> bool {
        let is_other = |block: &u64| !self.readied.contains(block) && !self.kept.contains(block);
        let is_movable = |block: &u64| {
            let zones = self.read(*block, "valid_zones");
            zones.is_some_and(|zones| zones.split_whitespace().next() == Some("Movable"))
        };
        let found = self.plugged.iter().copied().filter(is_other).filter(is_movable);
        let found: Vec<u64> = found.take(usize::try_from(count).unwrap_or(usize::MAX)).collect();
        if found.is_empty() {
            return false;
        }
        // A program of its own: only a signal ends the kernel's trying. One for all: to start it
        // takes as long as an empty block does.
        let mut command = Command::new("sh");
        command.args(["-c", "for state; do echo offline >\"$state\" || exit; done", "sh"]);
        command.args(found.iter().map(|block| self.path(*block, "state")));
        let begun = Instant::now();
        let result = run_program(&mut command, PATIENCE, ending);
        // The kernel may have taken blocks offline before it refused one, or before the program was
        // killed. The driver may have taken some meanwhile.
        let (went, others): (Vec<u64>, Vec<u64>) =
            found.into_iter().partition(|block| self.is_offline(*block));
        tracing::debug!(tried = count, blocks = went.len(), took = ?begun.elapsed(), "memory is readied");
        self.readied.extend(went);
        let stays = others.into_iter().find(|block| self.path(*block, "state").exists());
        if let Some(block) = stays {
            // Without an error somebody has brought it back at once, and would again.
            let error = result.err().map(|error| error.to_string());
            tracing::debug!(block, error, "a memory block stays in use");
            self.kept.insert(block);
        }
        true
    }

    /// Has one used again; false if there is none.
    pub(super) fn give_back_one(&mut self) -> bool {
        self.kept.clear();
        let Some(block) = self.readied.pop_last() else { return false };
        // Between the look and now the driver may have taken it.
        if let Err(error) = fs::write(self.path(block, "state"), "online_movable")
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(block, %error, "a memory block stays offline");
        }
        true
    }

    fn is_offline(&self, block: u64) -> bool {
        self.read(block, "state").as_deref() == Some("offline")
    }

    fn path(&self, block: u64, file: &str) -> PathBuf {
        self.root.join(format!("sys/devices/system/memory/memory{block}/{file}"))
    }

    fn read(&self, block: u64, file: &str) -> Option<String> {
        let text = fs::read_to_string(self.path(block, file)).ok()?;
        Some(text.trim().to_owned())
    }
}

/// Parses a line such as `  140000000-1bfffffff : System RAM (virtio_mem)`.
fn range(line: &str) -> Option<RangeInclusive<u64>> {
    let (range, name) = line.trim().split_once(" : ")?;
    let (start, end) = range.split_once('-').filter(|_| name == NAME)?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..=number(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    const BLOCK: u64 = 128 << 20;

    fn kernel(dir: &Path, numbers: &[u64]) {
        let sys = dir.join("sys/devices/system/memory");
        fs::create_dir_all(dir.join("proc")).unwrap();
        fs::create_dir_all(&sys).unwrap();
        fs::write(sys.join("block_size_bytes"), "8000000\n").unwrap();
        let mut iomem =
            "00001000-0009fbff : System RAM\n100000000-1ffffffff : virtio0\n".to_owned();
        for number in numbers {
            let (start, end) = (number * BLOCK, (number + 1) * BLOCK - 1);
            iomem += &format!("  {start:x}-{end:x} : System RAM (virtio_mem)\n");
            let block = sys.join(format!("memory{number}"));
            fs::create_dir_all(&block).unwrap();
            fs::write(block.join("state"), "online\n").unwrap();
            fs::write(block.join("valid_zones"), "Movable\n").unwrap();
        }
        fs::write(dir.join("proc/iomem"), iomem).unwrap();
    }

    fn state(dir: &Path, number: u64) -> String {
        let path = format!("sys/devices/system/memory/memory{number}/state");
        fs::read_to_string(dir.join(path)).unwrap().trim().to_owned()
    }

    #[test]
    fn movable_blocks_of_virtio_mem_are_taken_from_below_and_given_back() {
        let dir = tempfile::tempdir().unwrap();
        kernel(dir.path(), &[32, 33, 34]);
        let zones = dir.path().join("sys/devices/system/memory/memory32/valid_zones");
        fs::write(zones, "Normal\n").unwrap();
        let mut blocks = Blocks::open(dir.path().to_owned()).unwrap();
        blocks.look().unwrap();
        assert_eq!((blocks.plugged.len(), blocks.readied_bytes()), (3, 0));
        let ending = Ending::default();
        assert!(blocks.ready(1, &ending));
        assert_eq!((blocks.readied_bytes(), state(dir.path(), 33)), (BLOCK, "offline".to_owned()));
        assert!(blocks.ready(1, &ending) && !blocks.ready(1, &ending), "32 is not movable");
        assert_eq!(
            [32, 33, 34].map(|block| state(dir.path(), block)),
            ["online", "offline", "offline"]
        );
        // The driver gives one to the host.
        kernel(dir.path(), &[32, 33]);
        fs::write(dir.path().join("sys/devices/system/memory/memory33/state"), "offline").unwrap();
        blocks.look().unwrap();
        assert_eq!((blocks.plugged.len(), blocks.readied_bytes()), (2, BLOCK));
        // A manager that is killed now, and the next one.
        let mut blocks = Blocks::open(dir.path().to_owned()).unwrap();
        assert_eq!(blocks.readied_bytes(), BLOCK);
        assert!(blocks.give_back_one() && !blocks.give_back_one());
        assert_eq!(
            (blocks.readied_bytes(), state(dir.path(), 33)),
            (0, "online_movable".to_owned())
        );
    }

    #[test]
    fn several_are_taken_at_once_up_to_one_that_does_not_go() {
        let dir = tempfile::tempdir().unwrap();
        kernel(dir.path(), &[40, 41, 42, 43]);
        let refused = dir.path().join("sys/devices/system/memory/memory42/state");
        fs::remove_file(&refused).unwrap();
        fs::create_dir(&refused).unwrap();
        let mut blocks = Blocks::open(dir.path().to_owned()).unwrap();
        let ending = Ending::default();
        assert!(blocks.ready(4, &ending));
        assert_eq!((blocks.readied_bytes(), state(dir.path(), 43)), (2 * BLOCK, "online".into()));
        assert!(blocks.ready(4, &ending), "the one after it");
        assert_eq!((blocks.readied_bytes(), state(dir.path(), 43)), (3 * BLOCK, "offline".into()));
        assert!(!blocks.ready(4, &ending));
    }

    #[test]
    fn a_block_that_does_not_go_is_passed_over_until_all_are_given_back() {
        let dir = tempfile::tempdir().unwrap();
        kernel(dir.path(), &[40, 41]);
        let refused = dir.path().join("sys/devices/system/memory/memory40/state");
        fs::remove_file(&refused).unwrap();
        fs::create_dir(&refused).unwrap();
        let mut blocks = Blocks::open(dir.path().to_owned()).unwrap();
        let ending = Ending::default();
        assert!(blocks.ready(1, &ending) && blocks.readied_bytes() == 0);
        assert!(blocks.ready(1, &ending) && blocks.readied_bytes() == BLOCK, "the next one");
        assert!(!blocks.ready(1, &ending));
        while blocks.give_back_one() {}
        assert!(blocks.ready(1, &ending), "tried again");
    }

    #[test]
    fn a_block_that_is_offline_in_spite_of_an_error_is_readied() {
        let dir = tempfile::tempdir().unwrap();
        kernel(dir.path(), &[40]);
        let mut blocks = Blocks::open(dir.path().to_owned()).unwrap();
        // Says that it is offline, and refuses to be written.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut sealed = fs::File::from(memfd_create("state", flags).unwrap());
        sealed.write_all(b"offline\n").unwrap();
        fcntl_add_seals(&sealed, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE).unwrap();
        let state_path = blocks.path(40, "state");
        fs::remove_file(&state_path).unwrap();
        let sealed_path = format!("/proc/{}/fd/{}", std::process::id(), sealed.as_raw_fd());
        symlink(sealed_path, state_path).unwrap();
        assert!(blocks.ready(1, &Ending::default()));
        assert_eq!(blocks.readied_bytes(), BLOCK);
        assert!(blocks.kept.is_empty());
    }

    #[test]
    fn a_kernel_without_memory_blocks_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let error = Blocks::open(dir.path().to_owned()).expect_err("there is nothing");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
