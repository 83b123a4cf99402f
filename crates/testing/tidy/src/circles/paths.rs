//! Resolves named paths to the files that define them.

use super::graph::Imports;
use super::modules::{Id, Modules, Name, ROOT};
use super::source::Binding;

/// Most imports and globs that one path is followed through. The limit ends loops of imports.
/// Paths of the repository need at most 4 steps.
const MAX_STEPS: u32 = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// An item that this module defines.
    Item(Id),
    Module(Id),
    /// Another crate.
    Outside,
}

/// Adds the imports between the files of a crate.
pub(super) fn collect(modules: &Modules, imports: &mut Imports) {
    for id in modules.ids() {
        let module = modules.get(id);
        let uses = module.uses.iter().filter(|found| !found.reexport);
        let uses = uses.map(|found| (&found.path, found.binding == Binding::Glob));
        for (path, is_glob) in uses.chain(module.paths.iter().map(|path| (path, false))) {
            let Target::Item(target) = resolve(modules, id, path, MAX_STEPS) else { continue };
            let target = &modules.get(target).file;
            if *target != module.file {
                let mut shown = path.join("::");
                if is_glob {
                    shown += "::*";
                }
                let targets = imports.entry(module.file.clone()).or_default();
                targets.entry(target.clone()).or_insert(shown);
            }
        }
    }
}

/// Follows `path` from the module `from`.
fn resolve(modules: &Modules, from: Id, path: &[String], steps: u32) -> Target {
    let mut target = Target::Module(from);
    for (index, segment) in path.iter().enumerate() {
        let Target::Module(id) = target else { return target };
        let is_last = index + 1 == path.len();
        target = match segment.as_str() {
            "" => Target::Outside,
            "crate" => Target::Module(ROOT),
            "self" => target,
            "super" => modules.get(id).parent.map_or(Target::Outside, Target::Module),
            name => match lookup(modules, id, name, is_last, steps) {
                Some(found) => found,
                // The name of another crate, of the prelude, or of a local variable.
                None if index == 0 => Target::Outside,
                None => Target::Item(id),
            },
        };
    }
    target
}

/// Finds `name` in a module. The last name of a path is an item before it is a module.
fn lookup(modules: &Modules, id: Id, name: &str, is_last: bool, steps: u32) -> Option<Target> {
    let steps = steps.checked_sub(1)?;
    let module = modules.get(id);
    let meanings = module.names.get(name).map_or(&[][..], Vec::as_slice);
    let found = meanings.iter().map(|meaning| match meaning {
        Name::Item => Target::Item(id),
        Name::Module(child) => Target::Module(*child),
        Name::Import(path) => resolve(modules, id, path, steps),
    });
    let is_wanted = |target: &Target| matches!(target, Target::Item(_)) == is_last;
    let mut found: Vec<Target> = found.collect();
    found.sort_by_key(|target| (*target == Target::Outside, !is_wanted(target)));
    found.first().copied().or_else(|| {
        module.globs.iter().find_map(|glob| match resolve(modules, id, glob, steps) {
            Target::Module(other) if other != id => lookup(modules, other, name, is_last, steps),
            _ => None,
        })
    })
}
