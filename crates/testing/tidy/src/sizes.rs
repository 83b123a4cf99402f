//! Finds folders with too many files and files with too many lines.

use crate::rule::{Finding, Rule};
use crate::tree::{Tree, folder};
use std::collections::BTreeMap;

const MAX_FILES: u32 = 12;
const MAX_LINES: u32 = 500;
const MAX_LINES_WITH_A_REASON: u32 = 800;

/// Start of the header line that allows [`MAX_LINES_WITH_A_REASON`].
const REASON: &str = "//! Longer than 500 lines because ";

/// Finds folders that hold more than 12 Rust files.
pub(crate) fn folders(tree: &Tree) -> Vec<Finding> {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for (path, _) in tree.rust() {
        *counts.entry(folder(path)).or_default() += 1;
    }
    counts
        .into_iter()
        .filter(|(_, count)| *count > MAX_FILES)
        .map(|(path, count)| finding(Rule::Folders, path, count))
        .collect()
}

/// Finds Rust files with more than 500 lines, or more than 800 if their header has a reason.
pub(crate) fn lines(tree: &Tree) -> Vec<Finding> {
    tree.rust()
        .filter_map(|(path, text)| {
            let count = u32::try_from(text.lines().count()).unwrap_or(u32::MAX);
            (count > max_lines(text)).then(|| finding(Rule::Lines, path, count))
        })
        .collect()
}

fn max_lines(text: &str) -> u32 {
    let mut header = text.lines().take_while(|line| line.starts_with("//!"));
    if header.any(|line| line.starts_with(REASON)) { MAX_LINES_WITH_A_REASON } else { MAX_LINES }
}

fn finding(rule: Rule, path: &str, value: u32) -> Finding {
    Finding { rule, path: path.to_owned(), value, detail: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_counts_rust_files_of_each_folder() {
        let paths: Vec<String> = (0..13).map(|index| format!("a/{index}.rs")).collect();
        let mut files: Vec<(&str, &str)> = paths.iter().map(|path| (path.as_str(), "")).collect();
        files.extend([("a/b/x.rs", ""), ("a/x.md", "")]);
        let found = folders(&Tree::from_files(files.clone()));
        assert_eq!(found, [finding(Rule::Folders, "a", 13)]);
        files.remove(0);
        assert_eq!(folders(&Tree::from_files(files)), []);
    }

    #[test]
    fn lines_accepts_500_and_no_more() {
        let (fits, long) = ("x\n".repeat(500), "x\n".repeat(501));
        let tree = Tree::from_files([("fits.rs", fits.as_str()), ("long.rs", &long)]);
        assert_eq!(lines(&tree), [finding(Rule::Lines, "long.rs", 501)]);
    }

    #[test]
    fn lines_accepts_800_with_a_reason() {
        let reason = "//! Encodes pages.\n//!\n//! Longer than 500 lines because tables are.\n";
        let fits = reason.to_owned() + &"x\n".repeat(797);
        let long = reason.to_owned() + &"x\n".repeat(798);
        let tree = Tree::from_files([("fits.rs", fits.as_str()), ("long.rs", &long)]);
        assert_eq!(lines(&tree), [finding(Rule::Lines, "long.rs", 801)]);
    }
}
