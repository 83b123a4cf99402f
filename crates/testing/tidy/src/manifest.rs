//! Reads packages, dependencies and targets from each `Cargo.toml`.

use crate::tree::{Tree, folder, join, name};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// A `Cargo.toml` that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("cannot parse {path}; correct its TOML")]
pub struct ManifestError {
    path: String,
    source: toml::de::Error,
}

/// One package of the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Folder of the `Cargo.toml`.
    pub(crate) folder: String,
    /// Package names of `[dependencies]` and `[build-dependencies]`, without `[dev-dependencies]`.
    pub(crate) dependencies: BTreeSet<String>,
    /// Root files of its library, commands, tests, benches and examples.
    pub(crate) roots: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Manifest {
    package: Option<Named>,
    #[serde(default)]
    dependencies: Dependencies,
    #[serde(default)]
    build_dependencies: Dependencies,
    /// Dependencies of one platform.
    #[serde(default)]
    target: BTreeMap<String, Platform>,
    lib: Option<Target>,
    #[serde(default)]
    bin: Vec<Target>,
    #[serde(default)]
    test: Vec<Target>,
    #[serde(default)]
    bench: Vec<Target>,
    #[serde(default)]
    example: Vec<Target>,
    workspace: Option<Workspace>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Platform {
    #[serde(default)]
    dependencies: Dependencies,
    #[serde(default)]
    build_dependencies: Dependencies,
}

#[derive(Deserialize)]
struct Target {
    path: Option<String>,
}

#[derive(Deserialize)]
struct Workspace {
    #[serde(default)]
    dependencies: Dependencies,
}

type Dependencies = BTreeMap<String, toml::Value>;

/// Every package of the tree, in the order of folders.
pub(crate) fn packages(tree: &Tree) -> Result<Vec<Package>, ManifestError> {
    let mut manifests = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| name(path) == "Cargo.toml") {
        let manifest: Manifest = toml::from_str(text)
            .map_err(|source| ManifestError { path: path.to_owned(), source })?;
        manifests.push((folder(path), manifest));
    }
    let shared: Dependencies = manifests
        .iter()
        .filter_map(|(_, manifest)| manifest.workspace.as_ref())
        .flat_map(|workspace| workspace.dependencies.clone())
        .collect();
    Ok(manifests
        .iter()
        .filter_map(|(folder, manifest)| {
            Some(Package {
                name: manifest.package.as_ref()?.name.clone(),
                folder: (*folder).to_owned(),
                dependencies: dependencies(manifest, &shared),
                roots: roots(tree, folder, manifest),
            })
        })
        .collect())
}

fn dependencies(manifest: &Manifest, shared: &Dependencies) -> BTreeSet<String> {
    let platforms = manifest.target.values();
    platforms
        .flat_map(|platform| [&platform.dependencies, &platform.build_dependencies])
        .chain([&manifest.dependencies, &manifest.build_dependencies])
        .flatten()
        .map(|(key, value)| {
            let inherited = value.get("workspace").and_then(|_| shared.get(key));
            renamed(inherited.unwrap_or(value)).unwrap_or(key).to_owned()
        })
        .collect()
}

/// The package's own name, where a dependency has another.
fn renamed(dependency: &toml::Value) -> Option<&str> {
    dependency.get("package")?.as_str()
}

fn roots(tree: &Tree, folder: &str, manifest: &Manifest) -> BTreeSet<String> {
    let named = manifest
        .lib
        .iter()
        .chain(&manifest.bin)
        .chain(&manifest.test)
        .chain(&manifest.bench)
        .chain(&manifest.example)
        .filter_map(|target| target.path.as_deref())
        .map(|path| join(folder, path))
        .filter(|path| tree.text(path).is_some());
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let found = tree
        .rust()
        .filter(|(path, _)| path.strip_prefix(prefix.as_str()).is_some_and(is_root))
        .map(|(path, _)| path.to_owned());
    named.chain(found).collect()
}

/// Whether cargo finds a target's root at this path of a package.
fn is_root(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    matches!(
        parts[..],
        ["build.rs"]
            | ["src", "lib.rs" | "main.rs"]
            | ["src", "bin", _]
            | ["src", "bin", _, "main.rs"]
            | ["tests" | "benches" | "examples", _]
            | ["tests" | "benches" | "examples", _, "main.rs"]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Vec<Package> {
        packages(&Tree::from_files(files.iter().copied())).expect("valid manifests")
    }

    #[test]
    fn packages_lists_dependencies_without_those_of_tests() {
        let found = read(&[
            ("Cargo.toml", "[workspace.dependencies]\nb = { path = 'b', package = 'hecaton-b' }"),
            (
                "a/Cargo.toml",
                "[package]\nname = 'a'\n[dependencies]\nb.workspace = true\n\
                 [dev-dependencies]\nc = '1'\n[build-dependencies]\nd = '1'\n\
                 [target.'cfg(unix)'.dependencies]\ne = { version = '1', package = 'f' }",
            ),
        ]);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].folder.as_str()), ("a", "a"));
        let expected = ["hecaton-b", "d", "f"].map(str::to_owned);
        assert_eq!(found[0].dependencies, BTreeSet::from(expected));
    }

    #[test]
    fn packages_finds_named_and_conventional_roots() {
        let found = read(&[
            ("a/Cargo.toml", "[package]\nname = 'a'\n[[bin]]\nname = 'x'\npath = 'odd/x.rs'"),
            ("a/odd/x.rs", ""),
            ("a/odd/y.rs", ""),
            ("a/src/lib.rs", ""),
            ("a/src/other.rs", ""),
            ("a/tests/one.rs", ""),
            ("a/tests/two/main.rs", ""),
            ("a/tests/two/part.rs", ""),
        ]);
        let expected = ["a/odd/x.rs", "a/src/lib.rs", "a/tests/one.rs", "a/tests/two/main.rs"];
        assert_eq!(found[0].roots, BTreeSet::from(expected.map(str::to_owned)));
    }

    #[test]
    fn packages_names_a_manifest_that_is_not_valid() {
        let tree = Tree::from_files([("a/Cargo.toml", "[package")]);
        let error = packages(&tree).expect_err("not valid");
        assert_eq!(error.to_string(), "cannot parse a/Cargo.toml; correct its TOML");
    }
}
