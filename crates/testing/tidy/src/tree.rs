//! Reads the text files of the repository.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Extensions of the files that some rule reads.
const EXTENSIONS: [&str; 8] = ["rs", "md", "toml", "sh", "py", "c", "h", "js"];

/// Names without a useful extension that some rule reads.
const NAMES: [&str; 1] = ["Makefile"];

/// The text files of a repository, in memory.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    /// Reads the files below `root`. Skips hidden entries, symbolic links, `target` folders and
    /// files that no rule reads.
    ///
    /// A walk is used, and not `git ls-files`, so that the check runs on an unpacked archive and
    /// on files that are not added yet.
    ///
    /// # Errors
    ///
    /// A folder or a file cannot be read, or a file is not UTF-8.
    pub fn read(root: &Path) -> io::Result<Tree> {
        let mut files = BTreeMap::new();
        walk(root, "", &mut files)?;
        Ok(Tree { files })
    }

    /// A tree of the given paths and texts.
    pub fn from_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Tree {
        Tree { files: files.into_iter().map(|(path, text)| (path.into(), text.into())).collect() }
    }

    /// Every file as (path from the root, text), in the order of paths.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Every Rust file, as [`Tree::files`] gives it.
    pub(crate) fn rust(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(|(path, _)| path.ends_with(".rs"))
    }

    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }
}

/// The folder of a file; empty for the root.
pub(crate) fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The name of a file without its folder.
pub(crate) fn name(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

/// Joins a folder and a relative path, and resolves `..`.
pub(crate) fn join(folder: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in relative.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

fn walk(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) -> io::Result<()> {
    let said = |path: &Path, error: io::Error| {
        io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display()))
    };
    for entry in fs::read_dir(folder).map_err(|error| said(folder, error))? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if name.starts_with('.') {
            continue;
        }
        let path = join(prefix, &name);
        let kind = entry.file_type()?;
        if kind.is_dir() && name != "target" {
            walk(&entry.path(), &path, files)?;
        } else if kind.is_file() && is_read(&name) {
            let text =
                fs::read_to_string(entry.path()).map_err(|error| said(&entry.path(), error))?;
            files.insert(path, text);
        }
    }
    Ok(())
}

fn is_read(name: &str) -> bool {
    let extension = name.rsplit_once('.').map(|(_, extension)| extension);
    NAMES.contains(&name) || extension.is_some_and(|found| EXTENSIONS.contains(&found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_resolves_parent_folders() {
        assert_eq!(join("a/b", "../c/./d.rs"), "a/c/d.rs");
        assert_eq!(join("", "a.rs"), "a.rs");
    }

    #[test]
    fn folder_and_name_split_a_path() {
        assert_eq!((folder("a/b.rs"), name("a/b.rs")), ("a", "b.rs"));
        assert_eq!((folder("b.rs"), name("b.rs")), ("", "b.rs"));
    }

    #[test]
    fn read_takes_the_sources_of_this_crate() {
        let tree = Tree::read(Path::new(env!("CARGO_MANIFEST_DIR"))).expect("this crate");
        assert!(tree.text("src/tree.rs").is_some());
        assert!(tree.text("Cargo.toml").is_some());
    }

    #[test]
    fn read_skips_files_without_a_rule() {
        assert!(is_read("a.rs") && is_read("Makefile"));
        assert!(!is_read("Cargo.lock") && !is_read("a.trace"));
    }
}
