//! Finds files that import themselves through other files of their crate.
//!
//! A file imports the file that defines an item it names. Rules of the search:
//!
//! 1. A `mod` declaration is no import, and neither is a path that names only a module.
//! 2. A re-export (`pub use`) is no import. A path through it leads to the file with the item. The
//!    file of the re-export imports that file only if its own code uses the name.
//! 3. Code under `#[cfg(test)]` is left out: tests may use everything around them. The files of
//!    an integration test count.
//! 4. A glob (`use a::*`) imports the names that the code uses.
//! 5. A name that a module's file does not show, for example because a macro defines it, belongs to
//!    that file.
//!
//! Method calls are invisible to the search: a file that only calls methods of a type imports the
//! file that defines the type, and not the file of the `impl` block.

mod graph;
mod modules;
mod paths;
mod source;

use crate::manifest::Package;
use crate::rule::Finding;
use crate::tree::Tree;
use graph::{Imports, circles};
use modules::Modules;

/// Counts, for each file, the imports that lead back to the file.
pub(crate) fn check(tree: &Tree, packages: &[Package]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = packages
        .iter()
        .flat_map(|package| {
            let mut imports = Imports::new();
            for root in &package.roots {
                paths::collect(&Modules::read(tree, root), &mut imports);
            }
            circles(&imports)
        })
        .collect();
    findings.sort_by(|a, b| a.path.cmp(&b.path));
    findings.dedup_by(|a, b| a.path == b.path);
    findings
}

#[cfg(test)]
mod tests;
