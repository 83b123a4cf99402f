//! Limits dirty pages of the file system.
//!
//! A program may dirty pages much faster than they can be written to the pool. Then nothing could
//! be dropped from the page cache, which would grow without a limit. The kernel slows down who
//! dirties pages of a disk if these are near the disk's own limit (`strict_limit`, Linux 6.2).

use std::fs;
use std::io;
use std::path::PathBuf;

/// The disk's part of /sys.
#[derive(Clone, Debug)]
pub(crate) struct Throttle(PathBuf);

impl Throttle {
    /// That of the disk with this major and minor number.
    pub(crate) fn of([major, minor]: [u32; 2]) -> Throttle {
        Throttle(PathBuf::from(format!("/sys/class/bdi/{major}:{minor}")))
    }

    /// Lets so many bytes be dirty. The kernel begins to slow writers down at three quarters.
    ///
    /// # Errors
    /// The kernel has no such limits.
    pub(crate) fn set(&self, bytes: u64) -> io::Result<()> {
        fs::write(self.0.join("strict_limit"), "1")?;
        fs::write(self.0.join("max_bytes"), bytes.to_string())
    }
}
