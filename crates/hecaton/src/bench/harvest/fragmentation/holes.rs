//! Measures the holes in QEMU's memory files: what the host has back, and in which pieces.

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::Serialize;
use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

const HUGE: u64 = 2 << 20;

/// Bytes of the files that are not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(super) struct Holes {
    pub(super) all_bytes: u64,
    /// The part in whole, aligned pieces of 2 MiB.
    pub(super) whole_bytes: u64,
}

impl Holes {
    /// Sums the holes of all memory files of the process `qemu`.
    pub(super) fn of(qemu: u32) -> anyhow::Result<Self> {
        let mut seen = Vec::new();
        let mut holes = Self::default();
        for entry in fs::read_dir(format!("/proc/{qemu}/fd"))? {
            let path = entry?.path();
            let is_memory =
                |target: &Path| target.to_string_lossy().starts_with("/memfd:memory-backend");
            if !fs::read_link(&path).is_ok_and(|target| is_memory(&target)) {
                continue;
            }
            let file = File::open(&path)?;
            let metadata = file.metadata()?;
            if !seen.contains(&metadata.ino()) {
                seen.push(metadata.ino());
                holes.add(&file, metadata.len())?;
            }
        }
        anyhow::ensure!(!seen.is_empty(), "QEMU has no memory file");
        Ok(holes)
    }

    fn add(&mut self, file: &File, bytes: u64) -> rustix::io::Result<()> {
        let mut at = 0;
        while at < bytes {
            // The end of a file counts as a hole.
            let hole = seek(file, SeekFrom::Hole(at))?;
            let data = match seek(file, SeekFrom::Data(hole)) {
                Ok(data) => data,
                Err(Errno::NXIO) => bytes,
                Err(error) => return Err(error),
            };
            self.all_bytes += data - hole;
            let whole = (data / HUGE).saturating_sub(hole.div_ceil(HUGE));
            self.whole_bytes += whole * HUGE;
            at = data;
        }
        Ok(())
    }

    /// The growth since `before`.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            all_bytes: self.all_bytes.saturating_sub(before.all_bytes),
            whole_bytes: self.whole_bytes.saturating_sub(before.whole_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn pieces_are_whole_and_aligned() {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(8 * HUGE).unwrap();
        // One page in the first piece, one in the third, and one at the start of the sixth.
        for page in [4096, 2 * HUGE + 8192, 5 * HUGE] {
            file.write_all_at(&[1], page).unwrap();
        }
        let mut holes = Holes::default();
        holes.add(&file, 8 * HUGE).unwrap();
        assert_eq!(holes.all_bytes, 8 * HUGE - 3 * 4096);
        assert_eq!(holes.whole_bytes, 5 * HUGE);
        let later = Holes { all_bytes: holes.all_bytes + 7, ..holes };
        assert_eq!(later.since(holes), Holes { all_bytes: 7, whole_bytes: 0 });
    }
}
