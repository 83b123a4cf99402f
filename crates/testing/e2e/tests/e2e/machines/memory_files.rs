//! Looks into the memory files (`memfd`) of a process.

use rustix::fs::{SeekFrom, seek};
use std::{
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _},
};

/// A process's memory files, each once.
fn memory_files(pid: u32) -> anyhow::Result<Vec<fs::File>> {
    let mut files = Vec::new();
    let mut seen = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let is_memory =
            fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
        if !is_memory {
            continue;
        }
        let file = fs::File::open(&path)?;
        let number = file.metadata()?.ino();
        if !seen.contains(&number) {
            seen.push(number);
            files.push(file);
        }
    }
    Ok(files)
}

/// Returns how many bytes of a process's memory files are in memory now.
pub(crate) fn held(pid: u32) -> anyhow::Result<u64> {
    let mut blocks = 0;
    for file in memory_files(pid)? {
        blocks += file.metadata()?.blocks();
    }
    Ok(blocks * 512)
}

/// How many pages of a process's memory files are full of this text, which has 32 bytes at most.
pub(crate) fn pages_full_of(pid: u32, text: &str) -> anyhow::Result<usize> {
    let mut count = 0;
    for file in memory_files(pid)? {
        let mut at = 0;
        while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
            let hole = seek(&file, SeekFrom::Hole(data))?;
            let mut page = [0; 4096];
            for offset in (data..hole).step_by(page.len()) {
                file.read_exact_at(&mut page, offset)?;
                let mut windows = page[..64].windows(text.len());
                count += usize::from(windows.any(|bytes| bytes == text.as_bytes()));
            }
            at = hole;
        }
    }
    Ok(count)
}
