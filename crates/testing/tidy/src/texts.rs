//! Finds unclear openings of module headers, and lines that are too wide.

use crate::rule::{Finding, Rule};
use crate::tree::Tree;

const MAX_COLUMNS: usize = 100;

/// First words that a header must not have, unless its first sentence is a question.
const REFUSED_OPENINGS: [&str; 6] = ["what", "who", "whose", "whom", "whoever", "of"];

/// Finds Rust files whose `//!` header begins with one of [`REFUSED_OPENINGS`] or "That which".
pub(crate) fn headers(tree: &Tree) -> Vec<Finding> {
    tree.rust()
        .filter_map(|(path, text)| {
            let header = header(text)?;
            is_refused(&header).then(|| Finding {
                rule: Rule::Headers,
                path: path.to_owned(),
                value: 1,
                detail: format!("//! {}", header.lines().next().unwrap_or_default()),
            })
        })
        .collect()
}

/// The first paragraph of the first run of `//!` lines.
fn header(text: &str) -> Option<String> {
    let lines: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with("//!"))
        .map_while(|line| line.strip_prefix("//!"))
        .map(str::trim)
        .skip_while(|line| line.is_empty())
        .take_while(|line| !line.is_empty())
        .collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

fn is_refused(header: &str) -> bool {
    let mut words = header
        .split(|letter: char| !letter.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase);
    let first = words.next().unwrap_or_default();
    let which = first == "that" && words.next().as_deref() == Some("which");
    (which || REFUSED_OPENINGS.contains(&first.as_str())) && !is_question(header)
}

fn is_question(header: &str) -> bool {
    let end = header.match_indices(['.', '?', '!']).find(|(at, mark)| {
        header[at + mark.len()..].chars().next().is_none_or(char::is_whitespace)
    });
    end.is_some_and(|(_, mark)| mark == "?")
}

/// Counts comment lines and Markdown lines of more than 100 columns, for each file.
///
/// A comment line holds nothing but a comment. Lines that cannot be wrapped do not count: rows of
/// Markdown tables, and lines of one word, such as a link.
pub(crate) fn columns(tree: &Tree) -> Vec<Finding> {
    tree.files()
        .filter_map(|(path, text)| {
            let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
            let wide = |line: &&str| is_text(extension, line) && is_too_wide(line);
            let numbers: Vec<usize> = (1..)
                .zip(text.lines())
                .filter_map(|(number, line)| wide(&line).then_some(number))
                .collect();
            let last = numbers.last()?;
            Some(Finding {
                rule: Rule::Columns,
                path: path.to_owned(),
                value: u32::try_from(numbers.len()).unwrap_or(u32::MAX),
                detail: match numbers.len() {
                    1 => format!("line {last}"),
                    _ => format!("lines {} to {last}", numbers[0]),
                },
            })
        })
        .collect()
}

/// Whether the line of a file with this extension is a comment, or Markdown that can be wrapped.
fn is_text(extension: &str, line: &str) -> bool {
    let line = line.trim_start();
    match extension {
        "md" => !line.starts_with('|'),
        "rs" => line.starts_with("//"),
        "c" | "h" | "js" => ["//", "/*", "*"].iter().any(|mark| line.starts_with(mark)),
        _ => line.starts_with('#') && !line.starts_with("#!"),
    }
}

fn is_too_wide(line: &str) -> bool {
    let words = line.split_whitespace().filter(|word| word.contains(char::is_alphanumeric));
    line.chars().count() > MAX_COLUMNS && words.count() > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> bool {
        !headers(&Tree::from_files([("a.rs", text)])).is_empty()
    }

    #[test]
    fn headers_finds_refused_openings() {
        for word in ["What", "Who", "Whose", "Whom", "Whoever", "Of", "That which", "What's"] {
            assert!(refused(&format!("//! {word} is here.\n")), "{word}");
        }
        assert!(refused("#![allow(x)]\n//!\n//! What a donor\n//! lends. Why?\n"));
    }

    #[test]
    fn headers_accepts_statements_and_questions() {
        assert!(!refused("//! Offers pages. What else?\n"));
        assert!(!refused("//! Whatever comes is counted.\n"));
        assert!(!refused("//! That page is dirty.\n"));
        assert!(!refused("//! Who pays\n//! for `a.rs`? The node.\n"));
        assert!(!refused("//! Lends.\n//!\n//! What is lent comes back.\n"));
        assert!(!refused("// What a comment.\nfn f() {}\n"));
    }

    fn wide(path: &str, line: &str) -> u32 {
        let found = columns(&Tree::from_files([(path, line)]));
        found.first().map_or(0, |finding| finding.value)
    }

    #[test]
    fn columns_counts_wide_comments_and_markdown() {
        let words = "word ".repeat(20);
        for (path, line) in [
            ("a.rs", format!("    /// {words}")),
            ("a.md", format!("- {words}")),
            ("a.toml", format!("# {words}")),
            ("Makefile", format!("# {words}")),
            ("a.js", format!(" * {words}")),
        ] {
            assert_eq!(wide(path, &format!("{line}\n{line}\n")), 2, "{path}");
        }
        assert_eq!(columns(&Tree::from_files([("a.md", "é ".repeat(51).as_str())])).len(), 1);
    }

    #[test]
    fn columns_accepts_100_columns_code_and_lines_that_cannot_be_wrapped() {
        let words = "word ".repeat(30);
        assert_eq!(wide("a.md", &"é ".repeat(50)), 0);
        assert_eq!(wide("a.rs", &format!("let x = \"{words}\"; // {words}")), 0);
        assert_eq!(wide("a.md", &format!("| {words} |")), 0);
        assert_eq!(wide("a.md", &format!("- <https://example.org/{}>", "x".repeat(100))), 0);
        assert_eq!(wide("a.sh", &format!("#!/bin/sh {words}")), 0);
    }
}
