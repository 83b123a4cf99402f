//! Builds the module tree of one crate from its root file.

use super::source::{Binding, Source, Use};
use crate::tree::{Tree, folder, join};
use std::collections::BTreeMap;

/// Index of a module in [`Modules`].
pub(super) type Id = usize;

/// The root module of a crate.
pub(super) const ROOT: Id = 0;

/// Every module of a crate, the root first.
#[derive(Debug, Default)]
pub(super) struct Modules {
    list: Vec<Module>,
}

/// One module: a file, or a block in a file.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) file: String,
    pub(super) parent: Option<Id>,
    pub(super) names: BTreeMap<String, Vec<Name>>,
    /// Paths of `use a::*`.
    pub(super) globs: Vec<Vec<String>>,
    pub(super) uses: Vec<Use>,
    /// See [`Source::paths`].
    pub(super) paths: Vec<Vec<String>>,
}

/// One meaning of a name. A name may be a module, a type and a function at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Item,
    Module(Id),
    Import(Vec<String>),
}

impl Modules {
    /// Reads the modules below the crate root `root`. Modules without a file are left out.
    pub(super) fn read(tree: &Tree, root: &str) -> Modules {
        let mut modules = Modules::default();
        if let Some(text) = tree.text(root) {
            modules.add(tree, Source::parse(text), root, folder(root), None);
        }
        modules
    }

    pub(super) fn get(&self, id: Id) -> &Module {
        &self.list[id]
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Id> + use<> {
        0..self.list.len()
    }

    /// Adds a module whose children have their files in `children`.
    fn add(
        &mut self,
        tree: &Tree,
        source: Source,
        file: &str,
        children: &str,
        parent: Option<Id>,
    ) -> Id {
        let id = self.list.len();
        let mut names: BTreeMap<String, Vec<Name>> = BTreeMap::new();
        for item in source.items {
            names.entry(item).or_default().push(Name::Item);
        }
        for found in &source.uses {
            if let Binding::Name(name) = &found.binding {
                names.entry(name.clone()).or_default().push(Name::Import(found.path.clone()));
            }
        }
        let is_glob = |found: &&Use| found.binding == Binding::Glob;
        let globs = source.uses.iter().filter(is_glob).map(|found| found.path.clone()).collect();
        let paths = source.paths.into_iter().collect();
        let file = file.to_owned();
        self.list.push(Module { file, parent, names, globs, uses: source.uses, paths });
        for declared in source.modules {
            let below = join(children, &declared.name);
            let child = match (declared.inline, declared.path) {
                (Some(source), _) => {
                    let file = self.list[id].file.clone();
                    Some(self.add(tree, source, &file, &below, Some(id)))
                }
                (None, Some(path)) => {
                    let path = join(folder(&self.list[id].file), &path);
                    self.add_file(tree, &path, folder(&path), id)
                }
                (None, None) => self
                    .add_file(tree, &format!("{below}.rs"), &below, id)
                    .or_else(|| self.add_file(tree, &format!("{below}/mod.rs"), &below, id)),
            };
            if let Some(child) = child {
                let meaning = Name::Module(child);
                self.list[id].names.entry(declared.name).or_default().push(meaning);
            }
        }
        id
    }

    fn add_file(&mut self, tree: &Tree, path: &str, children: &str, parent: Id) -> Option<Id> {
        let text = tree.text(path)?;
        Some(self.add(tree, Source::parse(text), path, children, Some(parent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str)], root: &str) -> Vec<String> {
        let modules = Modules::read(&Tree::from_files(files.iter().copied()), root);
        modules.list.iter().map(|module| module.file.clone()).collect()
    }

    #[test]
    fn read_follows_module_files_of_every_layout() {
        let tree = [
            ("src/lib.rs", "mod a; mod b; #[path = \"odd/x.rs\"] mod c; mod gone;"),
            ("src/a.rs", "mod d;"),
            ("src/a/d.rs", ""),
            ("src/b/mod.rs", "mod e; mod f { mod g; }"),
            ("src/b/e.rs", ""),
            ("src/b/f/g.rs", ""),
            ("src/odd/x.rs", "mod y;"),
            ("src/odd/y.rs", ""),
        ];
        let expected = [
            "src/lib.rs",
            "src/a.rs",
            "src/a/d.rs",
            "src/b/mod.rs",
            "src/b/e.rs",
            "src/b/mod.rs",
            "src/b/f/g.rs",
            "src/odd/x.rs",
            "src/odd/y.rs",
        ];
        assert_eq!(files(&tree, "src/lib.rs"), expected);
    }

    #[test]
    fn read_finds_modules_beside_a_root_of_any_name() {
        let tree = [("tests/one.rs", "mod common;"), ("tests/common/mod.rs", "")];
        assert_eq!(files(&tree, "tests/one.rs"), ["tests/one.rs", "tests/common/mod.rs"]);
    }
}
