-- | Fills maps, and prints what they hold.
module Main (main) where

import qualified Data.IntMap.Strict as IntMap
import qualified Data.Map.Strict as Map
import Data.List (foldl')

main :: IO ()
main = do
  let count = 200000 :: Int
      numbers = foldl' (\m i -> IntMap.insert (i * 7919 `mod` count) [i, i * 2] m) IntMap.empty [0 .. count - 1]
      texts = foldl' (\m i -> Map.insert (show (i * 104729 `mod` count)) i m) Map.empty [0 .. count - 1]
  print (sum (map sum (IntMap.elems numbers)), Map.size texts, fst <$> Map.lookupMin texts)
  print (Map.foldl' (+) 0 (Map.filterWithKey (\k _ -> length k > 4) texts))
