//! Reads the kernel's figures of the host's memory from `/proc/meminfo`.

use std::path::Path;
use std::{fs, io};

/// Path of the kernel's memory figures.
pub const MEMINFO: &str = "/proc/meminfo";

/// Bytes of the field `name` in the text of `/proc/meminfo`. `None` without such a field in kB.
pub fn field_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes that programs could still have without swapping: `MemAvailable` of the file at `path`.
pub fn available_bytes(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    let missing = || io::Error::other(format!("{} has no MemAvailable", path.display()));
    field_bytes(&text, "MemAvailable").ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotalX: 1 kB\nMemTotal:       24 kB\nHugePages_Total:       3\n";
        assert_eq!(field_bytes(text, "MemTotal"), Some(24 << 10));
        assert_eq!(field_bytes(text, "HugePages_Total"), None);
        assert_eq!(field_bytes(text, "Mem"), None);
    }

    #[test]
    fn this_host_has_memory_available() {
        assert!(available_bytes(Path::new(MEMINFO)).is_ok_and(|bytes| bytes > 0));
        assert!(available_bytes(Path::new("/proc/version")).is_err());
    }
}
