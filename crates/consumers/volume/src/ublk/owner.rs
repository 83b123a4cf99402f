//! Whose a device is: the driver keeps a number for who made it, which outlives both.

use ring::digest::{SHA256, digest};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Who makes devices, as told by the directory that it lives in: whoever comes after it there finds what it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub(super) u64);

impl Owner {
    /// Who lives in a directory, by whatever path it is reached.
    pub fn of(dir: &Path) -> Owner {
        let path = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        let digest = digest(&SHA256, path.as_os_str().as_bytes());
        let first = digest.as_ref().first_chunk().expect("it has 32 bytes");
        // Others have flags there, in the lowest bits, or nothing.
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
