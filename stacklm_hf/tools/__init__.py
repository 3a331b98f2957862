"""Tools: what they are (spec), the door to them (toolbox), a calculator and three retrievers.

Heavy libraries load only where they are used: importing this package costs no more than numpy.
"""

from stacklm_hf.tools.bm25 import BM25Retriever
from stacklm_hf.tools.calculator import calc
from stacklm_hf.tools.dense import DenseRetriever
from stacklm_hf.tools.hashing import HashingRetriever
from stacklm_hf.tools.research import CalcTool, SearchTool
from stacklm_hf.tools.retrieval import Passage, Retriever
from stacklm_hf.tools.spec import Tool, ToolSpec
from stacklm_hf.tools.toolbox import ToolBox

__all__ = [
    "BM25Retriever",
    "CalcTool",
    "DenseRetriever",
    "HashingRetriever",
    "Passage",
    "Retriever",
    "SearchTool",
    "Tool",
    "ToolBox",
    "ToolSpec",
    "calc",
]
