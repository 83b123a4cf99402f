(* Fills a hash table and a balanced tree, and prints what they hold. *)
module Tree = Map.Make (Int)

let () =
  let count = 400_000 in
  let table = Hashtbl.create 16 in
  for i = 0 to count - 1 do
    Hashtbl.replace table ("key-" ^ string_of_int (i * 7919 mod count)) [ i; i * 2 ]
  done;
  let tree = ref Tree.empty in
  for i = 0 to count - 1 do
    tree := Tree.add (i * 104729 mod count) (Array.make 4 i) !tree
  done;
  Gc.compact ();
  let sum = Hashtbl.fold (fun _ v s -> s + List.fold_left ( + ) 0 v) table 0 in
  Printf.printf "%d %d\n" sum (Tree.fold (fun k v s -> s + (k * v.(0) mod 1000)) !tree 0)
