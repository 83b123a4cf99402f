//! Checks the structure of the repository against recorded counts.
//!
//! The design sets limits that the code does not meet everywhere yet. `counts.toml` records every
//! offender with its count. A recorded count may shrink and must not grow: the check is a ratchet.
//!
//! Pure, except [`Tree::read`]: every rule reads a [`Tree`] in memory and returns [`Finding`]s.

mod circles;
mod floors;
mod manifest;
mod ratchet;
mod rule;
mod sizes;
mod texts;
mod tree;

pub use manifest::ManifestError;
pub use ratchet::{Change, Counts, CountsError, Mode, Verdict, compare};
pub use rule::{Finding, Rule};
pub use tree::Tree;

/// Checks `tree` against every rule. The findings are in the order of rules, then of paths.
///
/// # Errors
///
/// A `Cargo.toml` of the tree is not valid.
pub fn check(tree: &Tree) -> Result<Vec<Finding>, ManifestError> {
    let packages = manifest::packages(tree)?;
    let mut findings = circles::check(tree, &packages);
    findings.extend(floors::check(&packages));
    findings.extend(sizes::folders(tree));
    findings.extend(sizes::lines(tree));
    findings.extend(texts::headers(tree));
    findings.extend(texts::columns(tree));
    Ok(findings)
}
