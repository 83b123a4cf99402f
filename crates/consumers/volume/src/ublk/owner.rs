//! Identifies the owner of a ublk device by a driver field that outlives the owner.

use ring::digest::{SHA256, digest};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Owner of devices, known by its directory. A successor there finds the devices left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub(super) u64);

impl Owner {
    /// Owner in a directory, the same for every path to the directory.
    pub fn of(dir: &Path) -> Owner {
        let path = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        let digest = digest(&SHA256, path.as_os_str().as_bytes());
        let first = digest.as_ref().first_chunk().expect("it has 32 bytes");
        // Other programs store nothing there, or flags in the lowest bits.
        Owner(u64::from_be_bytes(*first) | 1 << 63)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_the_same_owner_by_every_path() {
        let parent = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| parent.path().join(name));
        fs::create_dir(&a).unwrap();
        let alone = Owner::of(&b);
        std::os::unix::fs::symlink(&a, &b).unwrap();
        assert_eq!(Owner::of(&a), Owner::of(&b));
        assert_eq!(Owner::of(&a), Owner::of(&parent.path().join("a/../a")));
        assert_ne!(Owner::of(&a), alone);
    }
}
