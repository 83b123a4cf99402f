//! Names users of a volume's file or block device, as the kernel shows them.
//!
//! For messages only, and maybe incomplete: not every user sees the files of others' processes. A
//! mapped file may have no descriptor. Only a file's mount knows whether the file is in use at all.

use std::fs;
use std::path::Path;

/// Most users that are named.
const MAX_NAMED: usize = 8;

/// Describes users of a file: loop devices, mounts, swap, processes. Empty if none is visible.
pub fn holders(file: &Path) -> Vec<String> {
    let mut found = loop_devices(file);
    found.extend(mounts(file));
    found.extend(swap(file));
    found.extend(processes(file));
    found.truncate(MAX_NAMED);
    found
}

/// [`holders`] as a part of a sentence.
pub fn in_words(file: &Path) -> String {
    match holders(file) {
        found if found.is_empty() => {
            format!("somebody (`fuser -v {}` may tell by whom)", file.display())
        }
        found => found.join(", "),
    }
}

fn loop_devices(file: &Path) -> Vec<String> {
    let devices = entries(Path::new("/sys/block"));
    let is_on_it = |device: &String| {
        let backing = format!("/sys/block/{device}/loop/backing_file");
        fs::read_to_string(backing).is_ok_and(|path| Path::new(path.trim_end()) == file)
    };
    let named = devices.into_iter().filter(is_on_it);
    named.map(|device| format!("the loop device /dev/{device}")).collect()
}

fn mounts(file: &Path) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // Source and mount point.
    let fields = mounts.lines().filter_map(|line| line.split_once(' '));
    let of_file = fields.filter(|(what, _)| Path::new(what) == file);
    let place = |rest: &str| rest.split(' ').next().unwrap_or_default().to_owned();
    of_file.map(|(_, rest)| format!("the file system at {}", place(rest))).collect()
}

fn swap(file: &Path) -> Option<String> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut names = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    names.any(|name| Path::new(name) == file).then(|| "swap of this host".to_owned())
}

fn processes(file: &Path) -> Vec<String> {
    let mut found: Vec<u32> =
        entries(Path::new("/proc")).iter().filter_map(|entry| entry.parse().ok()).collect();
    found.retain(|pid| has_open(*pid, file) || has_mapped(*pid, file));
    found.sort_unstable();
    let name = |pid: u32| {
        let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("process {pid} ({})", command.trim_end())
    };
    found.into_iter().map(name).collect()
}

/// Compares links, not their targets: a look at the target would ask the server of the file.
fn has_open(pid: u32, file: &Path) -> bool {
    let descriptors = format!("/proc/{pid}/fd");
    let is_it = |descriptor: &String| {
        fs::read_link(format!("{descriptors}/{descriptor}")).is_ok_and(|link| link == file)
    };
    entries(Path::new(&descriptors)).iter().any(is_it)
}

fn has_mapped(pid: u32, file: &Path) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let path = file.to_string_lossy();
    // Five fields, and then the path.
    maps.lines().any(|line| line.ends_with(&*path) && line.contains(&format!(" {path}")))
}

fn entries(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().map_while(Result::ok);
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_file_open_or_mapped_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("disk");
        fs::write(&path, [1; 4096]).unwrap();
        assert_eq!(holders(&path), Vec::<String>::new());
        assert!(in_words(&path).contains("fuser -v"));
        let open = fs::File::open(&path).unwrap();
        let own = format!("process {} (", std::process::id());
        let found = holders(&path);
        assert!(found.len() == 1 && found[0].starts_with(&own), "{found:?}");
        drop(open);
        assert_eq!(holders(&path), Vec::<String>::new());
    }

    #[test]
    fn a_file_whose_name_ends_the_same_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("a file of two words");
        let _open = fs::File::create(&path).unwrap();
        assert_eq!(holders(Path::new("two words")), Vec::<String>::new());
        assert_eq!(holders(&path).len(), 1);
    }
}
